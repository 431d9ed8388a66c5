"""The bytes of a WebSocket. Imported when the first is opened, because that takes 40 ms."""

from __future__ import annotations

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol


class SocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's, among the connections that are watched: it sends pings itself."""

    def check(self, now: float) -> None:
        """No time limit: a socket may wait for ever."""

    def give_way(self) -> float | None:
        """A socket is never closed for another connection."""
        return None
