"""What a dialect of the API consists of: translations and a table of routes. It uses no engine.

To add a dialect, write a package with a `DIALECT` and name it in `server/dialects/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from octavo.balance.replica import ReplicaTimes
from octavo.checkpoint.pooling import Vector
from octavo.errors import RequestError
from octavo.generate.model import ServedModel
from octavo.generate.prepare import PreparedRequest
from octavo.generate.reply import TextDelta, Usage
from octavo.generate.request import GenerationRequest
from octavo.server.parsing import Fields

ErrorBody = Callable[[RequestError], bytes]  # the JSON of an error response
Names = Mapping[str, str]  # fields of a neutral request -> fields of a body


class ResponseWriter(Protocol):
    """Makes the bytes of one response from the text of all choices.

    stream: whether the response is sent in chunks; media_type: of those.
    """

    stream: bool
    media_type: str

    def opening(self) -> bytes:
        """What comes before the first chunk."""
        ...

    def chunks(self, delta: TextDelta) -> bytes:
        """New text of one choice."""
        ...

    def closing(self) -> bytes:
        """The end of a stream."""
        ...

    def failure(self, error: RequestError) -> bytes:
        """The end of a stream that cannot go on."""
        ...

    def whole(self, choices: Sequence[Sequence[TextDelta]]) -> bytes:
        """A response that is not streamed."""
        ...


@dataclass(frozen=True)
class BodyRoute:
    """A path with the body it takes. Bodies have a field `model`, which may be None.

    names: what errors call the fields of this body where a neutral request has other names.
    answer: the type of the reply, if that is no stream.
    """

    path: str
    body: type[msgspec.Struct]
    names: Callable[[Any], Names] = field(default=lambda _: {}, kw_only=True)
    answer: Any = field(default=dict[str, Any], kw_only=True)


@dataclass(frozen=True)
class GenerateRoute(BodyRoute):
    """Generates text: the request that a body asks for, and the writer of the response.

    nothing: the response of a body that asks for no text.
    """

    request: Callable[[Any], GenerationRequest]
    writer: Callable[[Any, PreparedRequest, Usage], ResponseWriter]
    nothing: Callable[[Any, ServedModel], bytes | None] = field(
        default=lambda body, served: None, kw_only=True
    )


Object = dict[str, Any]  # of JSON


class KeptWriter(ResponseWriter, Protocol):
    """response: what is kept of the response, complete once all is written."""

    response: Object


@dataclass(frozen=True)
class StoredRoute(BodyRoute):
    """Generates text that is kept, and continues what was kept. See `server/stored.py`.

    Bodies also have `previous_response_id`, `store` and `background`. prefix: of ids. request: what
    a body asks for after the items that were said before. items: those of a body, each with an id.
    queued: a response that has not begun: of a body, with its id, its model and the time; failed:
    one that has ended so.
    """

    prefix: str
    request: Callable[[Any, list[Object]], GenerationRequest]
    writer: Callable[[Any, PreparedRequest, Usage, str], KeptWriter]
    items: Callable[[Any], list[Object]]
    queued: Callable[[Any, str, str, int], Object]
    failed: Callable[[Object, RequestError], Object]


@dataclass(frozen=True)
class EmbedRoute(BodyRoute):
    """Computes a vector for each text of a body."""

    inputs: Callable[[Any], Sequence[str | list[int]]]
    reply: Callable[[Any, ServedModel, list[Vector], int], bytes]  # int: tokens of all texts


@dataclass(frozen=True)
class ScoreRoute(BodyRoute):
    """Computes how well the texts of each pair of a body match."""

    pairs: Callable[[Any], Sequence[tuple[str, str]]]
    reply: Callable[[Any, ServedModel, list[float], int], bytes]


@dataclass(frozen=True)
class TextRoute(BodyRoute):
    """Needs no engine, only the model's tokenizer and template."""

    reply: Callable[[Any, ServedModel], bytes]


@dataclass(frozen=True)
class ModelRoute:
    """Describes the loaded model that `model` in the query names; it may be left out for the only
    one."""

    path: str
    reply: Callable[[ServedModel], bytes]
    answer: Any = dict[str, Any]


@dataclass(frozen=True)
class DownloadProgress:
    """Bytes of one step of a download."""

    done: int
    total: int


@dataclass(frozen=True)
class FetchRoute(BodyRoute):
    """Fetches the model that a body names, for admins. line: says how far that is."""

    name: Callable[[Any], str | None]
    stream: Callable[[Any], bool]
    line: Callable[[str, str, DownloadProgress | None], bytes]
    media_type: str = "application/x-ndjson"


@dataclass(frozen=True)
class RefusedRoute:
    """Says why there is no such thing here."""

    path: str
    method: str
    reason: str


@dataclass(frozen=True)
class ModelCard:
    """A model, or an adapter of the model `parent`. served: None while it is not loaded.
    cache_tokens: that its engines' KV caches have room for; times: that they measure; 0 while they
    do not run."""

    name: str
    aliases: tuple[str, ...]
    created: int
    state: str  # unloaded, loading, ready or unavailable
    parent: str | None = None
    served: ServedModel | None = None
    cache_tokens: int = 0
    times: ReplicaTimes = ReplicaTimes()


@dataclass(frozen=True)
class ModelsRoute:
    """Lists the models, or describes the one that `{name}` in the path stands for."""

    path: str
    reply: Callable[[Sequence[ModelCard]], bytes]
    answer: Any = dict[str, Any]


@dataclass(frozen=True)
class FixedRoute:
    """Says the same whatever is served."""

    path: str
    reply: Callable[[], bytes]
    answer: Any = dict[str, Any]
    media_type: str = "application/json"


AnyRoute = BodyRoute | ModelRoute | ModelsRoute | FixedRoute | RefusedRoute


def error_event(body: bytes) -> bytes:
    return b"event: error\ndata: %b\n\n" % body


@dataclass(frozen=True)
class Dialect:
    """An API that the server speaks. fields: what any body may have besides its own fields.

    model_name: a model's own name, of what clients call it. name, error_schema: of the dialect and
    of its errors, for the OpenAPI document. error_event: how an event stream without any text tells
    the JSON of an error, and ends.
    """

    fields: Fields
    error_body: ErrorBody
    routes: tuple[AnyRoute, ...]
    model_name: Callable[[str | None], str | None] = lambda name: name
    name: str = "other"
    error_schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    error_event: Callable[[bytes], bytes] = error_event
