"""Endpoints by which every server, and every gateway, is watched."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.server import replies
from octavo.server.endpoint import Endpoint, Handler
from octavo.server.http import json_response
from octavo.server.metrics import Metrics


def about(metrics: Metrics, ready: Handler, answer: Any = dict[str, Any]) -> list[Endpoint]:
    """Health, metrics and version. ready: says whether requests can be taken, with such an
    answer."""
    version = msgspec.json.encode({"version": __version__})

    async def live(request: Request) -> Response:
        return json_response(b'{"status":"live"}')

    async def rendered(request: Request) -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def versioned(request: Request) -> Response:
        return json_response(version)

    return [
        Endpoint("/health", "GET", ready, answer=answer),
        Endpoint("/health/ready", "GET", ready, answer=answer),
        Endpoint("/health/live", "GET", live, answer=replies.Live),
        Endpoint("/metrics", "GET", rendered, media="text/plain", answer=str),
        Endpoint("/version", "GET", versioned, answer=replies.Version),
    ]
