"""The bytes of a WebSocket. Imported when the first is opened, because that takes 40 ms."""

from __future__ import annotations

from contextlib import suppress

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState


class SocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's, among the connections that are watched: it sends pings itself."""

    def check(self, now: float) -> None:
        """No time limit: a socket may wait for ever."""

    def shutdown(self) -> None:
        """Says that the server ends, unless the client has said that it does."""
        with suppress(InvalidState):
            super().shutdown()
        self.transport.close()

    @property
    def leaving(self) -> bool:
        """True once the socket is closed."""
        return bool(self.transport.is_closing())

    def give_way(self) -> float | None:
        """A socket is never closed for another connection."""
        return None
