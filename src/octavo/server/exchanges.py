"""ASGI middleware around everything: records each request once and answers unexpected errors."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import traceback
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import Overloaded, RequestError
from octavo.server.dialect import ErrorBody
from octavo.server.direct import DirectWriter
from octavo.server.exchange import Exchange, Observer, Running
from octavo.server.http import ClientMessages, refuse

REQUEST_ID = b"x-request-id"
PLAIN = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
BODIES = frozenset(("http.response.body", "websocket.http.response.body"))
STARTS = frozenset(("http.response.start", "websocket.http.response.start"))
LOG = logging.getLogger("octavo.server")


class InternalError(RequestError):
    status = 500

    def __init__(self) -> None:
        super().__init__("the server could not answer", code="internal_error")


@dataclass(frozen=True)
class RouteLabel:
    """What is recorded of requests to a path, and how their errors are written."""

    route: str
    error_body: ErrorBody


class Sender:
    """Sends the messages of an answer, and records in its exchange what is sent. direct: writes
    parts of a stream to whoever gets them from here."""

    def __init__(self, send: Send, scope: Scope, one: Exchange) -> None:
        self._send, self._scope, self._one = send, scope, one
        self.direct: DirectWriter | None = scope.pop("direct", None)
        self.started = self.complete = False

    def __call__(self, message: Message) -> Awaitable[None]:
        one, kind = self._one, message["type"]
        if kind in BODIES:
            one.sent += len(message.get("body") or b"")
            self.complete = not message.get("more_body", False)
            of_stream = one.final or not self.complete
            if of_stream and one.streamed is None and one.usage and one.usage.first:
                one.streamed = time.monotonic()
        elif kind in STARTS:
            self.started, one.status = True, message["status"]
            message = {**message, "headers": self._headers(message)}
        elif kind == "websocket.accept":
            self.started, one.status = True, 101
        elif kind == "websocket.close":
            self.started = self.complete = True
            one.status = one.status or 403  # which a server makes of a close before an accept
        else:
            one.sent += len(message.get("bytes") or (message.get("text") or "").encode())
        return self._send(message)

    def _headers(self, message: Message) -> list[tuple[bytes, bytes]]:
        """The headers of an answer, with what every answer says."""
        headers = [*message.get("headers", ()), (REQUEST_ID, self._one.id.encode())]
        if (sender := self._scope.get("principal")) is not None and sender.account is not None:
            headers += sender.account.headers()
        return headers


class ExchangeMiddleware:
    """Outermost middleware: gives each request an Exchange, and passes it to `observe` at its end.

    paths: what is known of each path. One that ends in "/" stands for all that begin with it,
    except the root; a part `*` for any other part. other: of every other path. running: is kept
    true.
    """

    def __init__(
        self, app: ASGIApp, paths: Mapping[str, RouteLabel], other: RouteLabel, observe: Observer,
        running: Running,
    ) -> None:  # fmt: skip
        self._app = app
        self._paths = paths
        starts = (path.partition("*")[0] for path in paths if path != "/")
        self._prefixes = list(dict.fromkeys(path for path in starts if path.endswith("/")))
        self._other = other
        self._observe = observe
        self._running = running

    def _find(self, path: str) -> RouteLabel:
        if path in self._paths:
            return self._paths[path]
        for prefix in self._prefixes:
            if path.startswith(prefix):
                rest = path.removeprefix(prefix).partition("/")[2]
                whole = self._paths.get(prefix, self._other)
                return self._paths.get(f"{prefix}*/{rest}", whole)
        return self._other

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        found = self._find(scope.get("path", ""))
        one = Exchange(found.route, scope.get("method", ""))
        if (given := _request_id(scope)) is not None:
            one.id = given
        scope["exchange"], scope["error_body"] = one, found.error_body
        self._running.setdefault(one.id, []).append(scope)
        sender = Sender(send, scope, one)
        heard = ClientMessages(receive, one, scope["type"], scope.pop("presence", None))
        try:
            await self._app(scope, heard, sender)
        except asyncio.CancelledError:
            if not sender.started:  # the end of the server does not wait for it any longer
                late = Overloaded("the server is shutting down", code="shutting_down")
                await refuse(late, scope, receive, sender)
            raise
        except Exception as e:
            error = internal(e)
            if not sender.started:
                await refuse(error, scope, receive, sender)
            elif not sender.complete:
                one.failed(error)
                raise
        finally:
            if one.work is None:
                self._end(one, scope)
            else:
                one.work.add_done_callback(lambda _: self._end(one, scope))

    def _end(self, one: Exchange, scope: Scope) -> None:
        if (sender := scope.get("principal")) is not None and sender.account is not None:
            one.key = sender.account.key.name
        one.finish()
        self._running[one.id].remove(scope)
        if not self._running[one.id]:
            del self._running[one.id]
        self._observe(one)


def internal(error: Exception) -> InternalError:
    """What a client is told of an error that nobody expected, which is logged."""
    LOG.error("%s", described(error))
    return InternalError()


def _request_id(scope: Scope) -> str | None:
    """What the client calls its request, if that is short and plain."""
    given = [value for name, value in scope["headers"] if name == REQUEST_ID]
    return given[0].decode() if len(given) == 1 and PLAIN.fullmatch(given[0]) else None


def described(error: BaseException) -> str:
    """Type and place of an error, without its text, which may quote a request."""
    last = traceback.extract_tb(error.__traceback__)[-3:]
    places = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(last)]
    return f"unexpected {type(error).__name__} at {' < '.join(places)}"
