"""Requests on a WebSocket: each has an end, also one that fails in its midst."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest
from starlette.websockets import WebSocket

from octavo.server.guard import Principal
from octavo.server.loopback import Loopback, Part
from octavo.server.sockets import SocketMessage, Sockets, _chunks
from tests.unit.asgi import error_body


class Failing(Loopback):
    """Begins a stream, and fails."""

    async def stream(
        self, path: str, body: bytes, sender: Any, part: Part, gone: Any, headers: Any = ()
    ) -> None:
        await part(200, "text/event-stream", b"data: 1\n\n", True)
        raise ValueError


class Client:
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.scope: dict[str, Any] = {"principal": Principal(), "headers": []}
        self.heard: list[Any] = []

    async def send_text(self, text: str) -> None:
        self.heard.append(json.loads(text))


@pytest.mark.parametrize(
    ("media", "part"),
    [("text/event-stream", b'event: x\ndata: {"a":"data: b"}\n\n: c\n\ndata: [1]\n\ndata: [DONE]\n\n'),
     ("text/event-stream", b'event: x\r\ndata: {"a":"data: b"}\r\n\r\ndata: [1]\r\n\r\ndata: [DONE]\r\n\r\n'),
     ("text/event-stream", b'data:{"a":"data: b"}\n\ndata:[1]\n\ndata:[DONE]\n\n'),
     ("application/x-ndjson", b'{"a":"data: b"}\n[1]\n'),
     ("application/x-ndjson", b'{"a":"data: b"}\r\n[1]\r\n')],
)  # fmt: skip
def test_events_are_read_as_any_server_may_write_them(media: str, part: bytes) -> None:
    assert [json.loads(chunk) for chunk in _chunks(media, part)] == [{"a": "data: b"}, [1]]


def test_a_stream_that_fails_is_told_and_ends() -> None:
    client = Client()
    sockets = Sockets(
        Failing(), lambda e: json.dumps(error_body(e).decode()).encode(), cast(Any, None)
    )
    asked = SocketMessage("a", "/v1/completions")
    asyncio.run(sockets._answer(cast(WebSocket, client), asked, asyncio.Event()))
    assert client.heard == [
        {"id": "a", "status": 200, "chunk": 1},
        {"id": "a", "status": 500, "body": "500 internal_error: the server could not answer"},
        {"id": "a", "done": True},
    ]
