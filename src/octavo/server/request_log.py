"""A file with a line of JSON for each request: numbers and names; contents only where asked for."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import UsageError
from octavo.server.exchange import Exchange, exchange
from octavo.server.logs import QUIET, exchange_fields
from octavo.server.phases import phases

MOST_CONTENT = 1 << 20  # bytes of a request, and of its answer, that are kept
MOST_LINES = 1000  # waiting to be written


class Contents:
    """What was sent and received, up to MOST_CONTENT each."""

    def __init__(self) -> None:
        self._request, self._response = bytearray(), bytearray()

    def took(self, message: Message) -> None:
        _keep(self._request, message.get("body", b""))

    def gave(self, message: Message) -> None:
        _keep(self._response, message.get("body", b""))

    def fields(self) -> dict[str, str]:
        return {
            "request": self._request.decode(errors="replace"),
            "response": self._response.decode(errors="replace"),
        }


def _keep(kept: bytearray, more: bytes) -> None:
    kept += more[: MOST_CONTENT - len(kept)]


class RequestLog:
    """Appends to a file, from a thread of its own. full: bodies too. Raises UsageError for a file
    that cannot be written.

    Lines are dropped, and their number is told by the next that is not, while the disk is too slow.
    """

    def __init__(
        self, path: Path, full: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        try:
            path.touch(0o600)
            self._file = path.open("a", encoding="utf-8")
        except OSError as e:
            raise UsageError(
                f"--log-requests {path}: {e.strerror}", "--log-requests FILE"
            ) from None
        self._full, self._clock = full, clock
        self._contents: dict[int, Contents] = {}  # of requests in flight, by their exchanges
        self._dropped = 0
        self._waiting: Queue[dict[str, Any] | None] = Queue(MOST_LINES)
        self._writer = Thread(target=self._write, daemon=True)
        self._writer.start()

    def wrap(self, app: ASGIApp) -> ASGIApp:
        return self._watched(app) if self._full else app

    def _watched(self, app: ASGIApp) -> ASGIApp:
        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)
            contents = self._contents[id(exchange(scope))] = Contents()

            async def received() -> Message:
                message = await receive()
                contents.took(message)
                return message

            async def sent(message: Message) -> None:
                contents.gave(message)
                await send(message)

            await app(scope, received, sent)

        return watched

    def observe(self, one: Exchange) -> None:
        contents = self._contents.pop(id(one), None)
        if one.route in QUIET:
            return
        line = {"time": round(self._clock() - one.seconds, 6), "id": one.id, **exchange_fields(one)}
        if one.usage is not None:
            line["phases"] = {name: round(spent, 6) for name, spent in phases(one).items()}
            line["signs"] = one.usage.signs
        if contents is not None:
            line |= contents.fields()
        if self._dropped:
            line["dropped"] = self._dropped
        try:
            self._waiting.put_nowait(line)
            self._dropped = 0
        except Full:
            self._dropped += 1

    def _write(self) -> None:
        while (line := self._waiting.get()) is not None:
            try:
                self._file.write(json.dumps(line) + "\n")
                if self._waiting.empty():
                    self._file.flush()
            except OSError:  # the disk is full: what follows may fit again
                self._dropped += 1

    def close(self) -> None:
        self._waiting.put(None)
        self._writer.join()
        with suppress(OSError):  # the disk is full
            self._file.close()
