"""What logs and metrics learn of a request: numbers and names, never contents."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.types import ASGIApp, Scope

from octavo.errors import RequestError, place
from octavo.generate.reply import Usage
from octavo.server.direct import DirectWriter

LOG = logging.getLogger("octavo.server")
OTHER = "other"  # the route of paths without one


@dataclass
class Exchange:
    """Filled in while a request is served. A stream that fails has the status of its error."""

    route: str = OTHER
    method: str = ""
    status: int = 0
    code: str | None = None
    received: int = 0  # bytes of bodies
    sent: int = 0
    usage: Usage | None = None
    model: str | None = None  # the served model's name, once it is known
    id: str = field(default_factory=lambda: f"req_{secrets.token_hex(12)}")  # x-request-id
    cancelled: bool = False
    listeners: set[asyncio.Task[Any]] = field(default_factory=set)  # wait for what its client says
    at_leave: list[Callable[[], None]] = field(default_factory=list)  # hears that it has left
    operation: str = "other"  # as OpenTelemetry's conventions for generative AI call it
    key: str | None = None  # the name of the sender's key
    stream_awaited: bool = False  # a stream is wanted, and its text is not begun
    replayed: bool = False  # answered as the same request was before
    began: float = field(default_factory=time.monotonic)
    streamed: float | None = None  # when the first bytes after its first token were sent
    ended: float = 0.0
    at_end: list[Callable[[], None]] = field(default_factory=list)  # gives back what it used
    work: asyncio.Task[None] | None = None  # goes on after the response, and is part of it
    direct: DirectWriter | None = None  # of its stream, if no layer looks at what is sent
    final: bool = False  # what its stream still gives is sent with its end

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token: in a stream until it was sent, else until it was sampled."""
        if self.usage is None or self.usage.first is None:
            return None
        return (self.streamed or self.usage.first) - self.began

    @property
    def outcome(self) -> str:
        """How it ended: answered, refused, cancelled or failed."""
        if self.status in (499, 0):
            return "cancelled"
        return ("answered", "refused", "failed")[max(0, self.status // 100 - 3)]

    def cancel(self) -> None:
        """Ends it as if its client had left."""
        self.cancelled = True
        for task in self.listeners:
            task.cancel()
        self.left()

    def left(self) -> None:
        """Tells whoever works for it that its client has left."""
        for tell in list(self.at_leave):
            tell()

    def finish(self) -> None:
        """The request has ended, whatever its status. As its answer has been sent, what goes wrong
        is only logged."""
        self.ended = time.monotonic()
        for give_back in self.at_end:
            try:
                give_back()
            except Exception as e:
                LOG.error("after a request: %s", place(e))
        self.at_end.clear()  # these, and the writer's request, hold it: its body would stay
        self.direct = None

    def failed(self, error: RequestError) -> None:
        self.status, self.code = error.status, error.code


class Watcher(Protocol):
    """Sees every request: its messages, and its exchange once it has ended."""

    def wrap(self, app: ASGIApp) -> ASGIApp: ...

    def observe(self, one: Exchange) -> None: ...

    def close(self) -> None:
        """Writes what is not written yet. May block."""
        ...


Observer = Callable[[Exchange], None]
Running = dict[str, list[Scope]]  # requests in flight by their ids


def exchange(scope: Scope) -> Exchange:
    """The exchange of a request, as `ExchangeMiddleware` has set it."""
    found = scope["exchange"]
    assert isinstance(found, Exchange)
    return found
