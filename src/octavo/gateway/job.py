"""A request on its way, and what became of it so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from octavo.gateway.body import Relayed
from octavo.gateway.errors import NoUpstream
from octavo.gateway.traffic import Dealt
from octavo.gateway.upstreams import UpstreamLease
from octavo.generate.reply import Usage
from octavo.server.resume import Follower, Resume, asking


@dataclass
class RelayJob:
    """A request on its way: where it may go, and what became of it so far."""

    asked: Relayed
    headers: dict[str, str]
    dealt: Dealt
    usage: Usage
    resume: Resume | None = None
    follower: Follower | None = None
    failed: set[str] = field(default_factory=set)  # upstreams that did
    tries: int = 0  # that failed since the answer last went on
    failovers: int = 0
    retries: int = 0
    hedges: int = 0  # second upstreams that were asked
    hedge_won: bool = False
    lease: UpstreamLease | None = None
    tail: bytes = b""  # of what was passed on
    chunks: int = 0

    @property
    def body(self) -> bytes:
        """What the upstream is sent now."""
        assert self.lease is not None
        if self.resume is None or not self.lease.upstream.own:
            return self.asked.body
        tokens = [] if self.follower is None else self.follower.tokens
        return asking(self.asked.body, msgspec.structs.replace(self.resume, tokens=tokens))

    def follow(self, own: bool) -> None:
        """An upstream is asked next. own: it can go on with the stream, and be followed. Raises
        NoUpstream if it would begin anew what a client has had a part of."""
        if own:
            self.follower = self.follower or Follower([])
        elif self.tokens:
            raise NoUpstream(
                "no upstream is left that can go on with the stream", "no_upstream", 2.0
            )
        else:
            self.follower = None

    def pass_on(self, data: bytes) -> None:
        """Part of a stream goes to the client."""
        if self.dealt.seen is not None:
            self.dealt.seen.feed(data)

    @property
    def tokens(self) -> int:
        return self.chunks if self.follower is None else len(self.follower.tokens)
