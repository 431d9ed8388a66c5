"""Parts of an answer that are written where they come in, without a task that sends them."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class DirectWriter:
    """Writes parts of the answer to one request. It skips all layers between, so it is for answers
    that have begun in chunks, and of which no layer wants to see what is sent."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def open(self) -> bool:
        """A part can be written now: its client is there and keeps up."""
        cycle = self._cycle
        shut = cycle.flow.write_paused or cycle.disconnected or cycle.response_complete
        return cycle.chunked_encoding is True and not shut

    def write(self, data: bytes) -> None:
        """Writes a part, which is not empty."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
