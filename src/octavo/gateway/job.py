"""A request on its way, and what became of it so far."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from octavo.balance.retry import RETRYABLE
from octavo.engine.request import MIN_TIMEOUT
from octavo.gateway.body import Relayed
from octavo.gateway.errors import NoUpstream
from octavo.gateway.events import Finished
from octavo.gateway.prepared import prepared
from octavo.gateway.token_limits import TokenLimit, limited, take
from octavo.gateway.traffic import Dealt
from octavo.gateway.upstream import Upstream
from octavo.gateway.upstreams import UpstreamLease
from octavo.generate.reply import Usage
from octavo.server.cache_events import PROMPT_NAME
from octavo.server.exchange import Exchange, exchange
from octavo.server.guard import principal
from octavo.server.most_tokens import MOST_TOKENS, read_most
from octavo.server.resume import Follower, Resume, Spent, asking


@dataclass
class RelayJob:
    """A request on its way: where it may go, and what became of it so far."""

    asked: Relayed
    headers: dict[str, str]
    dealt: Dealt
    usage: Usage
    resume: Resume | None = None
    limit: TokenLimit | None = None  # of its sender's key, if it could take more
    follower: Follower | None = None
    failed: set[str] = field(default_factory=set)  # upstreams that did
    tries: int = 0  # that failed since the answer last went on
    failovers: int = 0
    retries: int = 0
    hedges: int = 0  # second upstreams that were asked
    hedge_won: bool = False
    spared: int | None = None  # the status of an error that a prepared answer came for
    lease: UpstreamLease | None = None
    ends: tuple[bytes, bytes] = (b"", b"")  # the last two parts with data that were passed on
    chunks: int = 0  # events with data that were, or the tokens that they say they are
    erred: bool = False  # what was passed on is, or has, an error of the upstream
    late: bool = False  # which is that its client wants it no more

    @property
    def body(self) -> bytes:
        """What the upstream is sent now."""
        assert self.lease is not None
        upstream = self.lease.upstream
        if self.limit is not None and not upstream.own:
            context = upstream.contexts.get(self.asked.outline.model or "", 0)
            return self.limit.body(self.asked, context)
        if not upstream.own:
            return self.asked.body
        due, body = self.due, self.asked.body
        if due is not None:
            body = with_time_left(body, due)
        if self.resume is None:
            return body
        tokens = [] if self.follower is None else self.follower.tokens
        return asking(body, msgspec.structs.replace(self.resume, tokens=tokens))

    @property
    def due(self) -> float | None:
        """When its client's own `timeout` has passed (`time.monotonic`)."""
        seconds = self.asked.timeout
        return None if seconds is None else self.usage.began + seconds

    def told(self, upstream: Upstream) -> dict[str, str]:
        """What Octavo's servers hear of it in headers of their own."""
        found = {}
        if upstream.cache.tells and (name := self.asked.prompt_name):
            found[PROMPT_NAME] = name
        if self.limit is not None and upstream.own:
            found[MOST_TOKENS] = str(max(1, self.limit.total))
        return found

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

    def spare(self, status: int) -> Response | None:
        """What the configuration has its model say in place of this status of an error."""
        text = self.dealt.route.prepared_answer
        if text is None or status not in RETRYABLE:
            return None
        found = prepared(self.asked, text)
        self.spared = None if found is None else status
        return found

    def settle(self) -> None:
        """Counts, about, what a stream has given that did not come to its end, as where its client
        has left: who leaves early has used it all the same."""
        if self.usage.first is not None and not self.usage.reached:
            count(self.usage, Spent(self.asked.ask.tokens, self.tokens))

    def finished(self, one: Exchange) -> Finished:
        """What is told of it once its exchange has ended."""
        usage, lease = self.usage, self.lease
        return Finished(
            model=one.model or "", version=self.dealt.version,
            replica="" if lease is None else lease.upstream.id,
            pool="" if lease is None else lease.upstream.place.pool,
            status=self.spared or one.status,
            code=one.code, seconds=one.seconds,
            ttft=None if usage.first is None else usage.first - one.began,
            itl=None if usage.first is None or usage.last is None or self.tokens < 2
            else (usage.last - usage.first) / (self.tokens - 1),
            prompt_tokens=usage.prompt, completion_tokens=usage.completion,
            retries=self.retries, failovers=self.failovers, hedges=self.hedges,
            hedge_won=self.hedge_won, prepared=self.spared is not None,
        )  # fmt: skip

    @property
    def tokens(self) -> int:
        return self.chunks if self.follower is None else len(self.follower.tokens)


def with_time_left(body: bytes, due: float) -> bytes:
    """A body, an object of JSON with a `timeout`, with what is left of that now: what comes last
    counts. A server takes it from when it is asked."""
    left = max(MIN_TIMEOUT, round(due - time.monotonic(), 3))
    return b'%b,"timeout":%.3f}' % (body[: body.rindex(b"}")], left)


def count(usage: Usage, spent: Spent) -> None:
    usage.prompt, usage.completion = spent.prompt_tokens, spent.completion_tokens
    usage.reached, usage.reused = {0: spent.prompt_tokens}, {0: spent.cached_tokens}


async def reserve(scope: Scope, job: RelayJob) -> None:
    """Takes the request, and the tokens it may use, from its sender's account. Raises RateLimited,
    InvalidValue."""
    most = read_most(job.headers)  # of a gateway before this one
    if (account := principal(scope).account) is not None:
        one = exchange(scope)
        await account.enter()
        one.at_end.append(account.end)
        if account.counts_tokens:
            meter, job.asked, job.limit = await take(account, job.asked)
        else:
            meter = await account.take(job.asked.ask.tokens, 0)
        one.at_end.append(lambda: meter.settle(job.usage.computed))
    if most is not None:
        total = most if job.limit is None else min(most, job.limit.total)
        job.limit = limited(job.asked, total)
