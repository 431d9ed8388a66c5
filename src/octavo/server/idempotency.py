"""`Idempotency-Key`: a request that is sent again gets the answer that it got the first time.

What ended for reasons that pass (no room, a limit, a client that left, an engine that failed) is
not kept: the request is computed when it comes again.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import InvalidValue, Overloaded, RequestError
from octavo.server.exchange import exchange
from octavo.server.guard import principal
from octavo.server.http import ClientGone, refuse, while_connected

NAME = "idempotency-key"
REPLAYED = (b"idempotent-replayed", b"true")
PLAIN = re.compile(r"[\x21-\x7e]{1,255}")
KEPT = 86_400.0  # seconds
MOST_ANSWERS = 4096
MOST_BYTES = 64 << 20  # of all answers
MOST_ANSWER = 4 << 20  # of one; a longer one is not kept
FINAL = frozenset({200, 201, 400, 404, 413, 415, 422})  # of what would be answered alike again
Id = tuple[str, str, str]  # salt of the sender, path, key


class KeyReused(RequestError):
    status = 422

    def __init__(self) -> None:
        message = f"this {NAME} came with another body before; a new request needs a new key"
        super().__init__(message, NAME, "idempotency_key_reused")


@dataclass(eq=False)
class _Answer:
    """An answer that is being made, or has been. body: the digest of what was asked."""

    began: float
    body: bytes = b""
    messages: list[Message] = field(default_factory=list)
    size: int = 0
    kept: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Idempotency:
    """ASGI middleware, behind the checks that say who the sender is."""

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._clock = clock
        self._answers: OrderedDict[Id, _Answer] = OrderedDict()  # the oldest first
        self._bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        try:
            if (id := _id(scope)) is None:
                return await self._app(scope, receive, send)
            self._forget()
            if (known := self._answers.get(id)) is None:
                return await self._first(id, scope, receive, send)
            await self._again(known, scope, receive, send)
        except RequestError as e:
            await refuse(e, scope, receive, send)
        except ClientGone:
            await Response(status_code=499)(scope, receive, send)

    def _forget(self) -> None:
        """Drops the oldest answers while there are too many, and those that are too old; none that
        is being made, for it to be made once and its bytes to be counted once."""
        now = self._clock()
        for id, answer in list(self._answers.items()):
            fits = len(self._answers) <= MOST_ANSWERS and self._bytes <= MOST_BYTES
            if fits and answer.began + KEPT > now:
                return
            if answer.done.is_set():
                self._drop(id, answer)

    def _drop(self, id: Id, answer: _Answer) -> None:
        if self._answers.get(id) is answer:
            del self._answers[id]
            self._bytes -= answer.size * answer.kept

    async def _first(self, id: Id, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, and keeps the answer unless its reason may pass."""
        answer = self._answers[id] = _Answer(self._clock())
        digest, read, sent = hashlib.sha256(), False, False

        async def heard() -> Message:
            nonlocal read
            message = await receive()
            if message["type"] == "http.request":
                digest.update(message.get("body", b""))
                read = read or not message.get("more_body", False)
            return message

        async def told(message: Message) -> None:
            nonlocal sent
            answer.size += len(message.get("body", b""))
            if answer.size <= MOST_ANSWER:
                answer.messages.append(message)
            await send(message)
            started = message["type"] == "http.response.start"
            sent = not started and not message.get("more_body", False)

        try:
            await self._app(scope, heard, told)
            final = exchange(scope).status in FINAL and answer.size <= MOST_ANSWER
            answer.kept = read and sent and final
        finally:
            answer.body = digest.digest()
            if answer.kept:
                self._bytes += answer.size
            else:
                self._drop(id, answer)
            answer.done.set()

    async def _again(self, known: _Answer, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers as before, once that is known. Raises RequestError, ClientGone."""
        digest = hashlib.sha256()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            digest.update(message.get("body", b""))
            if not message.get("more_body", False):
                break
        await while_connected(receive, known.done.wait())
        if not known.kept:
            raise Overloaded("the first request with this key had no answer; send it again", NAME,
                             "overloaded", 0.05)  # fmt: skip
        if known.body != digest.digest():
            raise KeyReused
        exchange(scope).replayed = True
        start, *rest = known.messages
        await send({**start, "headers": [*start["headers"], REPLAYED]})
        for each in rest:
            await send(each)


def _id(scope: Scope) -> Id | None:
    """What a request is known by; None for one that may be computed again. Raises InvalidValue."""
    given = [value for name, value in scope["headers"] if name == NAME.encode()]
    if not given:
        return None
    key = given[0].decode("latin-1")
    if len(given) > 1 or not PLAIN.fullmatch(key):
        raise InvalidValue(f"{NAME} has 1 to 255 visible ASCII characters", NAME)
    return principal(scope).salt, scope["path"], key
