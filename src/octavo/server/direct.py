"""Parts of an answer that are written where they come in, without a task that sends them."""

from __future__ import annotations

from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class DirectWriter:
    """Writes parts of the answer to one request with its transport's `write`. It skips all layers
    between, so it is for answers that have begun, and that none of those wants to see."""

    def __init__(self, cycle: RequestResponseCycle, write: Callable[[bytes], None]) -> None:
        self._cycle, self._write = cycle, write

    def open(self) -> bool:
        """A part can be written now: the answer is one in chunks, its client is there and keeps
        up."""
        cycle = self._cycle
        return not (cycle.flow.write_paused or cycle.disconnected) and bool(cycle.chunked_encoding)

    def write(self, data: bytes) -> None:
        """Writes a part, which is not empty."""
        self._write(b"%x\r\n%b\r\n" % (len(data), data))
