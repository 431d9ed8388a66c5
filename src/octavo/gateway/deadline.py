"""How long an upstream is waited for, before it has said anything."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType

from octavo.gateway.errors import UpstreamFailed
from octavo.gateway.upstream import Upstream


class Deadline:
    """A context that ends after so many seconds, or once it is cut, as when its upstream is known
    to be down. Raises UpstreamFailed then."""

    def __init__(self, upstream: Upstream, seconds: float) -> None:
        self._upstream, self._seconds = upstream, seconds
        self._why = ""

    def cut(self, why: str) -> None:
        """Ends it now."""
        self._why = self._why or why
        with suppress(RuntimeError):  # it is over already
            self._limit.reschedule(asyncio.get_running_loop().time())

    @property
    def over(self) -> bool:
        """Whether it has passed, or was cut."""
        return self._limit.expired()

    async def __aenter__(self) -> Deadline:
        self._upstream.cut.add(self.cut)
        self._limit = asyncio.timeout(self._seconds)
        await self._limit.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        who = f"upstream {self._upstream.id}"
        self._upstream.cut.discard(self.cut)
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError:
            if self._why:
                raise UpstreamFailed(f"{who} {self._why}", "upstream_down") from None
            why = f"{who} gave no first token for {self._seconds:g} s"
            raise UpstreamFailed(why, "upstream_timeout", True) from None
