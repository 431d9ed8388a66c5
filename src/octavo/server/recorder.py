"""ASGI middleware around everything: each request is recorded once, and none ends in plain text."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import Overloaded, RequestError
from octavo.server.exchange import OTHER, Exchange, Observer
from octavo.server.http import error_response

LOG = logging.getLogger("octavo.server")


class InternalError(RequestError):
    status = 500


class Recorder:
    """Gives each request an Exchange, and `observe` that exchange when it has ended.

    labels: the routes of paths. A path that begins with one that ends in "/" has its route too.
    """

    def __init__(self, app: ASGIApp, labels: Mapping[str, str], observe: Observer) -> None:
        self._app = app
        self._labels = labels
        self._observe = observe

    def _route(self, path: str) -> str:
        if path in self._labels:
            return self._labels[path]
        starts = (start for start in self._labels if start[-1:] == "/" and path.startswith(start))
        return self._labels.get(next(starts, ""), OTHER)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        one = Exchange(self._route(scope.get("path", "")), scope.get("method", ""))
        scope["exchange"] = one
        started = complete = False

        async def counted(message: Message) -> None:
            nonlocal started, complete
            if message["type"] == "http.response.start":
                started, one.status = True, message["status"]
            else:
                complete = not message.get("more_body", False)
            one.sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except asyncio.CancelledError:
            if not started:  # the end of the server does not wait for it any longer
                late = Overloaded("the server is shutting down", code="shutting_down")
                await error_response(late, scope)(scope, receive, counted)
            raise
        except Exception as e:
            LOG.error("%s", described(e))
            error = InternalError("the server could not answer", code="internal_error")
            if not started:
                await error_response(error, scope)(scope, receive, counted)
            elif not complete:
                one.failed(error)
                raise
        finally:
            one.ended = time.monotonic()
            self._observe(one)


def described(error: BaseException) -> str:
    """Where an error was raised. What it says is left out: that may be a user's."""
    last = traceback.extract_tb(error.__traceback__)[-3:]
    places = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(last)]
    return f"unexpected {type(error).__name__} at {' < '.join(places)}"
