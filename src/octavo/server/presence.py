"""Whether the client of a request is still there: said by its connection, without a task that asks
for it."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from octavo.server.exchange import Exchange


class Presence:
    """The client of the request that a connection reads in `cycle`. one: is told once the client
    has left."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self.cycle = cycle
        self.one: Exchange | None = None

    def heed(self) -> bool:
        """Whether nobody has to listen: all of the request has come and was read. The connection
        is read on, or it would not notice."""
        cycle = self.cycle
        if cycle.more_body or cycle.body:
            return False
        cycle.flow.resume_reading()
        return True

    @property
    def gone(self) -> bool:
        return self.cycle.disconnected

    def leave(self) -> None:
        """The client has left."""
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        if self.one is not None:
            self.one.left()
