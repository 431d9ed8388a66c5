"""Parts of a stream that are written where they come in, before a real client."""

from __future__ import annotations

import http.client
import time
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message, Receive, Scope, Send

from octavo.server.dialects.openai.errors import error_body
from octavo.server.exchange import OTHER, Exchange, exchange
from octavo.server.exchanges import ExchangeMiddleware, RouteLabel
from octavo.server.http import EventStream
from tests.unit.test_connection import Backend, backend

PART = b"x" * 65536


class Streaming(Backend):
    """/few writes a part between two frames, /many until its client is behind; behind /seen/ is a
    layer that looks at what is sent."""

    written = 0

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        label = RouteLabel(OTHER, error_body)
        await ExchangeMiddleware(self.seen, {}, label, self.exchanges.append, {})(
            scope, receive, send
        )

    async def seen(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def looked(message: Message) -> None:
            await send(message)

        path, one = scope["path"], exchange(scope)
        stream = EventStream(self.frames(path, one), "text/plain")
        await stream(scope, receive, looked if path.startswith("/seen/") else send)

    async def frames(self, path: str, one: Exchange) -> AsyncGenerator[bytes, None]:
        yield b"first "
        if (direct := one.direct) is None:
            yield b"unseen "
        elif path == "/few":
            self.write(one, b"between ")
        else:
            while direct.open():
                self.write(one, PART)
        yield b"last"

    def write(self, one: Exchange, data: bytes) -> None:
        assert one.direct is not None and one.direct.open()
        one.direct.write(data)
        self.written += len(data)


def body(server: Backend, path: str, pause: float = 0) -> bytes:
    asked = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    asked.request("GET", path)
    answer = asked.getresponse()
    time.sleep(pause)
    data = answer.read()
    asked.close()
    return data


@pytest.mark.parametrize(
    ("path", "said"),
    [("/few", b"first between last"), ("/seen/few", b"first unseen last")],
)
def test_parts_come_in_their_order(path: str, said: bytes) -> None:
    with backend(made=Streaming) as server:
        assert body(server, path) == said


def test_a_client_that_does_not_read_shuts_it_and_misses_nothing() -> None:
    with backend(made=Streaming) as server:
        data = body(server, "/many", 0.2)
        assert isinstance(server, Streaming)
        assert data == b"first " + PART * (server.written // len(PART)) + b"last"
        assert server.written >= len(PART)
