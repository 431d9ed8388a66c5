"""An application on its port: connections within limits, and an end that drains."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from functools import partial
from types import FrameType
from typing import Any, Protocol, cast

import uvicorn
from starlette.types import ASGIApp

from octavo.server.bodies import MAX_BODY
from octavo.server.connection import Connection, ConnectionLimits, connection_limit, watch
from octavo.server.exchange import Observer, Running

KEEP_ALIVE = 30  # seconds between requests
DRAIN_LOOK = 0.02  # seconds between looks whether all is answered
HURRY = 3  # seconds for errors to be sent after the time to drain


class Serving(Protocol):
    """What is served. draining: it takes nothing new."""

    draining: bool

    async def close(self) -> None:
        """Ends every request that runs with an error."""
        ...


class HttpServer(uvicorn.Server):
    """The first signal drains, the second ends at once.

    Requests that are running when their time is up end with an error that says so. running: all of
    them, also those of sockets and what goes on in the background.
    """

    def __init__(
        self, config: uvicorn.Config, serving: Serving, drain_timeout: float, running: Running
    ) -> None:
        super().__init__(config)
        self._serving = serving
        self._running = running
        self._drain_timeout = drain_timeout
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._serving.draining = True
        self.force_exit = self.should_exit
        self.should_exit = True
        if self.force_exit:
            self._loop.call_soon_threadsafe(self._hang_up)

    async def serve_on(self, sock: socket.socket) -> None:
        """Serves on a socket until a signal. To be cancelled is as one: the first time drains, the
        second ends at once."""
        serving = asyncio.create_task(self.serve([sock]))
        cancelled: asyncio.CancelledError | None = None
        while not serving.done():
            try:
                await asyncio.shield(serving)
            except asyncio.CancelledError as e:
                cancelled = e
                self.handle_exit(0, None)
        if cancelled is not None:
            raise cancelled

    def _hang_up(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._watch = asyncio.create_task(watch(self.server_state.connections))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_requests())
        try:
            await self._drain()
            self.config.timeout_graceful_shutdown = HURRY
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            self._watch.cancel()

    async def _drain(self) -> None:
        """Waits for what is being answered. Sockets stay open meanwhile, for their answers."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_timeout + HURRY):
                while not self.force_exit and any(
                    s["type"] == "http" for each in self._running.values() for s in each
                ):
                    await asyncio.sleep(DRAIN_LOOK)

    async def _end_requests(self) -> None:
        await asyncio.sleep(self._drain_timeout)
        await self._serving.close()


def _socket_protocol(**given: Any) -> asyncio.Protocol:
    from octavo.server.socket_protocol import SocketProtocol

    return SocketProtocol(**given)


def http_server(
    app: ASGIApp, serving: Serving, drain_timeout: int, write_timeout: float, observe: Observer,
    running: Running,
) -> HttpServer:  # fmt: skip
    """A server of an application. running: the application's requests; observe: is told of those
    that are refused before."""
    from octavo.server.dialects import DIALECTS

    limits = ConnectionLimits(connection_limit(), write_seconds=write_timeout)
    connection = partial(
        Connection, limits=limits, observe=observe, error_body=DIALECTS[0].error_body
    )
    config = uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], connection),
        ws=cast(type[asyncio.Protocol], _socket_protocol),
        ws_max_size=MAX_BODY,
        ws_per_message_deflate=False,
        log_level="critical",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # nothing asks where a request comes from
        server_header=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=drain_timeout + HURRY,
    )
    return HttpServer(config, serving, drain_timeout, running)
