"""What answers at a path: the server's own endpoints, which belong to no dialect."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Endpoint:
    """body: the JSON that it takes. media, answer: the media type and the type of what it says.
    query, form: JSON Schemas of what its URL and its multipart body may have, by name."""

    path: str
    method: str
    handler: Handler
    body: type[msgspec.Struct] | None = None
    media: str = "application/json"
    answer: Any = dict[str, Any]
    query: Mapping[str, Any] = field(default_factory=dict)
    form: Mapping[str, Any] = field(default_factory=dict)
