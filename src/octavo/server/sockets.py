"""/v1/ws: several requests on one WebSocket, to any route that takes a body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from octavo.errors import InvalidValue, Overloaded, RequestError
from octavo.server.dialect import ErrorBody
from octavo.server.exchanges import InternalError
from octavo.server.guard import Principal, principal
from octavo.server.loopback import Loopback
from octavo.server.parsing import NOT_JSON

MOST_RUNNING = 64  # requests of one socket
MAX_ID = 64
# Headers of the socket that go for each of its requests.
FOR_ALL = (
    b"authorization", b"x-api-key", b"x-session-id", b"x-experiment-unit", b"x-slo-ttft-ms",
    b"x-most-tokens", b"x-sender",
)  # fmt: skip
encode = msgspec.json.Encoder().encode


class SocketMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A message of a client: a request under an id of its own, or the end of one."""

    id: str
    path: str | None = None
    body: msgspec.Raw = msgspec.Raw()
    cancel: bool = False


class SocketRequest(NamedTuple):
    """A request of a socket. gone: set when nobody waits for its answer any longer."""

    task: asyncio.Task[None]
    gone: asyncio.Event


class Sockets:
    """The handler of /v1/ws.

    error_body: how what is wrong with a message is told. owner: who has a key of a salt; it raises
    Unauthorized once the key is none.
    """

    def __init__(
        self, loopback: Loopback, error_body: ErrorBody, owner: Callable[[str], Principal]
    ) -> None:
        self._loopback, self._error_body, self._owner = loopback, error_body, owner

    async def serve(self, socket: WebSocket) -> None:
        """Answers messages until the socket is closed, which ends what still runs."""
        await socket.accept()
        running: dict[str, SocketRequest] = {}
        try:
            while True:
                await self._take(socket, await _text(socket), running)
        except WebSocketDisconnect:
            pass
        finally:
            for one in running.values():
                one.gone.set()
            tasks = [one.task for one in running.values()]
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(self, socket: WebSocket, text: str, running: dict[str, SocketRequest]) -> None:
        """Begins or ends a request."""
        id = None
        try:
            asked = _read(text)
            id = asked.id
            if asked.cancel:
                if id in running:
                    running[id].gone.set()
                return
            self._owner(principal(socket.scope).salt)  # a socket may outlive its key
            if id in running:
                raise InvalidValue(f"a request with the id {id!r} is running", "id")
            if len(running) >= MOST_RUNNING:
                raise Overloaded(f"{MOST_RUNNING} requests run on this socket", code="overloaded")
        except RequestError as e:
            return await _send(socket, id, status=e.status, body=msgspec.Raw(self._error_body(e)))
        gone = asyncio.Event()
        running[id] = SocketRequest(asyncio.create_task(self._answer(socket, asked, gone)), gone)
        running[id].task.add_done_callback(lambda _: running.pop(asked.id, None))

    async def _answer(self, socket: WebSocket, asked: SocketMessage, gone: asyncio.Event) -> None:
        """Sends the answer of one request, in chunks if it is streamed, and its end."""
        whole = bytearray()

        async def part(status: int, media: str, data: bytes, more: bool) -> None:
            if media == "application/json":
                whole.extend(data)
                if not more:
                    body = msgspec.Raw(bytes(whole))
                    await _send(socket, asked.id, status=status, body=body)
                return
            for chunk in _chunks(media, data):
                await _send(socket, asked.id, status=status, chunk=msgspec.Raw(chunk))

        sender = principal(socket.scope)
        said = [(k, v) for k, v in socket.scope["headers"] if k in FOR_ALL]
        path, given = asked.path or "", bytes(asked.body)
        try:
            await self._loopback.stream(path, given, sender, part, gone, said)
        except Exception:  # it has been logged; a connection would be cut off
            error = msgspec.Raw(self._error_body(InternalError()))
            await _send(socket, asked.id, status=InternalError.status, body=error)
        end = {"cancelled": True} if gone.is_set() else {"done": True}
        await _send(socket, asked.id, **end)


async def _text(socket: WebSocket) -> str:
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect
    text = message.get("text")
    return text if text is not None else bytes(message["bytes"]).decode("utf-8", "replace")


def _read(text: str) -> SocketMessage:
    """A message. Raises InvalidValue."""
    try:
        asked = msgspec.json.decode(text, type=SocketMessage)
    except NOT_JSON as e:
        raise InvalidValue(f"a message is an object with id, path and body: {e}") from None
    if not 1 <= len(asked.id) <= MAX_ID:
        raise InvalidValue(f"id has 1 to {MAX_ID} characters", "id")
    if not asked.cancel and (asked.path is None or not asked.path.startswith("/")):
        raise InvalidValue("path is that of a route, as /v1/chat/completions", "path")
    return asked


def _chunks(media: str, data: bytes) -> Iterator[bytes]:
    """The objects that a part of a stream consists of."""
    for line in data.splitlines():
        if media == "text/event-stream":
            if not line.startswith(b"data:"):
                continue
            line = line.removeprefix(b"data:").strip()
        if line and line != b"[DONE]":
            yield line


async def _send(socket: WebSocket, id: str | None, **fields: Any) -> None:
    """Sends a message, or nothing to a client that has left, as `_text` will say."""
    with suppress(WebSocketDisconnect, RuntimeError):  # the second: both sides are closing
        await socket.send_text(encode({"id": id, **fields}).decode())
