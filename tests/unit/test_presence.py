"""Work that ends with its client, as the connection tells, before a real client."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from octavo.server.dialects.openai.errors import error_body
from octavo.server.exchange import OTHER, exchange
from octavo.server.exchanges import ExchangeMiddleware, RouteLabel
from octavo.server.http import ClientGone, while_connected
from octavo.server.presence import Presence
from tests.unit.test_connection import QUICK, Backend, backend, request
from tests.waiting import until

BIG = 1 << 20  # bytes of a body, for which the connection stops reading meanwhile


class Working(Backend):
    """/unread works while the body of its request is not read, /late begins when told to, /twice
    is cancelled as well. tasks: that ran beside the work; left: requests whose clients have."""

    tasks = left = working = come = 0

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        label = RouteLabel(OTHER, error_body)
        await ExchangeMiddleware(self.works, {}, label, self.exchanges.append, {})(
            scope, receive, send
        )

    async def works(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, before = scope["path"], len(asyncio.all_tasks())
        while path != "/unread" and (await receive())["more_body"]:
            pass
        self.come += 1
        while path == "/late" and not self.release.is_set():
            await asyncio.sleep(0.01)
        self.working += 1
        try:
            await while_connected(receive, self.work(before, scope))
        except ClientGone:
            self.left += 1

    async def work(self, before: int, scope: Scope) -> None:
        await asyncio.sleep(0.05)
        self.tasks = len(asyncio.all_tasks()) - before
        try:
            await asyncio.Event().wait()
        finally:
            if scope["path"] == "/twice":
                exchange(scope).cancel()


def post(path: str, size: int) -> bytes:
    return request(path, f"Content-Length: {size}", method="POST") + b"a" * size


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    sock.close()


def closed(sock: socket.socket) -> None:
    sock.close()


def malformed(sock: socket.socket) -> None:
    """What follows cannot be read, so that the connection is given up once it is closed, too."""
    sock.sendall(b"\0")
    sock.close()


@pytest.mark.parametrize("leave", [reset, closed, malformed])
@pytest.mark.parametrize(("path", "size"), [("/", 0), ("/", BIG), ("/unread", 0), ("/twice", 0)])
def test_work_ends_when_its_client_leaves(
    leave: Callable[[socket.socket], None], path: str, size: int
) -> None:
    with backend(QUICK, Working) as server, server.dial() as sock:
        assert isinstance(server, Working)
        sock.sendall(post(path, size))
        until(lambda: server.working)
        leave(sock)
        until(lambda: server.left)
        assert not server.tasks


def test_work_for_a_client_that_has_left_ends_at_once() -> None:
    with backend(QUICK, Working) as server, server.dial() as sock:
        assert isinstance(server, Working)
        sock.sendall(post("/late", 0))
        until(lambda: server.come)
        reset(sock)
        until(lambda: server.server is not None and not server.server.server_state.connections)
        server.release.set()
        until(lambda: server.left)


def test_a_connection_is_read_on_to_notice_the_end() -> None:
    """The end of a large body stops it while nobody has taken what came."""
    flow = Mock()
    cycle = SimpleNamespace(flow=flow, more_body=False, body=bytearray(), disconnected=False)
    assert Presence(cast(RequestResponseCycle, cycle)).heed()
    flow.resume_reading.assert_called_once()


def test_a_body_that_was_not_read_is_taken_meanwhile() -> None:
    """Or the connection would not be read, and nobody notice that the client leaves."""
    with backend(QUICK, Working) as server, server.dial() as sock:
        assert isinstance(server, Working)
        sock.sendall(post("/unread", BIG))
        until(lambda: server.working)
        sock.close()
        until(lambda: server.left)
