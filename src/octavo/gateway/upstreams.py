"""The upstreams there are, who of them takes a request, and what became of those they took."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from octavo.balance.breaker import Breaker
from octavo.balance.cost import Ask
from octavo.balance.prefix_index import ReplicaPrefixes
from octavo.balance.router import Candidate, Router
from octavo.engine.block_changes import CachedPrompt
from octavo.gateway.upstream import ANY, ModelFigures, Place, Upstream
from octavo.gateway.upstream_cache import MOST_SENT, HeldBlocks, Indexes

LOG = logging.getLogger("octavo.gateway")
MEASURED = 64  # tokens of a prompt that tells how fast prompts are computed


class UpstreamLease:
    """A request at an upstream, from before it is sent until its end; `end` may be called twice.
    model: as its upstream has it; held: of its prompt meanwhile."""

    def __init__(
        self, upstreams: Upstreams, upstream: Upstream, model: str, ask: Ask,
        held: HeldBlocks | None,
    ) -> None:  # fmt: skip
        self.upstream = upstream
        self._upstreams, self._model = upstreams, model
        self._tokens, self._held = ask.tokens, held
        self._probe = upstream.breaker.begin()
        self._alone = not upstream.waiting  # no other prompt is before it
        self._began = time.monotonic()
        self._first: float | None = None
        self._open = True
        upstream.waiting += 1
        upstream.waiting_tokens += ask.tokens

    def first(self) -> None:
        """Its first token has come, so that the upstream serves again, however long it takes."""
        up, self._first = self.upstream, time.monotonic()
        if self._probe:
            up.breaker.succeeded(self._probe)
            self._probe = False
        if self._alone and self._tokens >= MEASURED:
            up.measured_prompt(self._tokens, self._first - self._began)
        up.waiting -= 1
        up.waiting_tokens -= self._tokens
        up.running += 1
        self._upstreams.changed(up)

    def end(self, good: bool | None = None, tokens: int = 0, rest: float = 0.0) -> None:
        """It has ended: well, badly (False), or without a result (None), as where a client left.
        tokens: that it gave. rest: seconds in which its upstream wants no more of the model."""
        if not self._open:
            return
        self._open = False
        up = self.upstream
        up.cache.end(self._held)
        if self._first is None:
            up.waiting -= 1
            up.waiting_tokens -= self._tokens
        else:
            up.running -= 1
            if tokens > 1:
                up.measured_step((time.monotonic() - self._first) / (tokens - 1))
        if rest:
            self._upstreams.rest(up, self._model, rest)
        if good is None:
            up.breaker.cancelled(self._probe)
        elif good:
            up.breaker.succeeded(self._probe)
        else:
            before = up.breaker.state
            up.breaker.failed(self._probe)
            if up.breaker.state == "open" != before:
                LOG.warning("upstream %s fails; it gets nothing for a while", up.id)
        self._upstreams.changed(up)
        self._upstreams.freed()


@dataclass(frozen=True)
class Selection:
    """What became of looking for an upstream. known: somebody serves the model. full: somebody
    would take the request, but has as many as it may."""

    lease: UpstreamLease | None
    known: bool = True
    full: bool = False


class Upstreams:
    """policy: how they are chosen. places: requests at each at most. freed: is called whenever one
    may take a request that could not be taken before."""

    def __init__(
        self, policy: str = "cost", places: int = 256, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._policy, self._places, self._clock = policy, places, clock
        self._all: dict[str, Upstream] = {}
        self._routers: dict[tuple[str, str], Router] = {}  # by pool and model
        self._tripped: dict[str, Upstream] = {}  # those whose breakers are not closed
        self._changed: dict[str, Upstream] = {}  # since somebody was chosen, by id
        self.freed: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[Upstream]:
        return iter(list(self._all.values()))

    def get(self, name: str) -> Upstream | None:
        return self._all.get(name)

    def has(self, pool: str) -> bool:
        """Whether anybody is in a pool."""
        return any(up.place.pool == pool for up in self._all.values())

    def add(self, place: Place) -> Upstream:
        """An upstream that is new, or known already: one in another pool or with another key from
        now on, or one that was drained and takes requests again."""
        upstream = self._all.setdefault(place.id, Upstream(place, Breaker(self._clock)))
        if upstream.place != place:
            self._withdraw(upstream, upstream.models)
            upstream.place = place
            self.changed(upstream)
            self.freed()
        if upstream.state == "draining":
            upstream.state = "starting"
        return upstream

    def configure(self, policy: str, places: int) -> None:
        """Chooses so from now on. Another policy forgets sessions and sent prefixes."""
        if policy != self._policy:
            self._routers.clear()
            for upstream in self:
                upstream.cache.forget()
        self._policy, self._places = policy, places
        for upstream in self:
            self.changed(upstream)
        self.freed()

    def remove(self, upstream: Upstream) -> None:
        """Forgets an upstream; its answers are cut."""
        if self._all.pop(upstream.id, None) is not None:
            self._withdraw(upstream, upstream.models)
            self._tripped.pop(upstream.id, None)
            self._changed.pop(upstream.id, None)
            self._wake(upstream)
            self._cut(upstream, "was removed")
            upstream.state = "down"
            self.freed()  # who waits for it alone has waited long enough

    def listen(self, upstream: Upstream) -> None:
        """An own upstream begins to tell what its prefix caches hold, with all that they do."""
        upstream.cache.listen(self._indexes(upstream))

    def told(self, upstream: Upstream, prompts: Sequence[CachedPrompt]) -> None:
        """An upstream tells what its prefix caches hold of these prompts."""
        upstream.cache.told(prompts, self._indexes(upstream))

    def _indexes(self, upstream: Upstream) -> Indexes:
        pool, models = upstream.place.pool, upstream.models
        return {model: self._router(pool, model).index for model in models}

    def drain(self, upstream: Upstream) -> None:
        """Sends an upstream nothing more; what it has goes on."""
        upstream.state = "draining"
        self.changed(upstream)

    def rest(self, upstream: Upstream, model: str, seconds: float) -> None:
        """An upstream is as good as full for a while: it has said that it is busy with a model."""
        if (before := upstream.rests.pop(model, None)) is not None:
            before.cancel()
        loop = asyncio.get_running_loop()
        upstream.rests[model] = loop.call_later(seconds, self._rested, upstream, model)
        self.changed(upstream)

    def _wake(self, upstream: Upstream) -> None:
        """What an upstream has said of being busy counts no longer."""
        for timer in upstream.rests.values():
            timer.cancel()
        upstream.rests.clear()

    def _rested(self, upstream: Upstream, model: str) -> None:
        del upstream.rests[model]
        self.changed(upstream)
        self.freed()

    def up(self, upstream: Upstream, figures: Mapping[str, ModelFigures], own: bool) -> None:
        """A probe was answered: the upstream serves these models. After it was down it has nothing
        cached."""
        models = tuple(figures)
        if upstream.state != "up":
            LOG.info("upstream %s is up: %s", upstream.id, ", ".join(models) or "no model")
        kept = () if upstream.state == "down" else models
        self._withdraw(upstream, [model for model in upstream.models if model not in kept])
        if set(models) - set(upstream.models):
            upstream.cache.forget()  # it may have told of those before
        upstream.state, upstream.models, upstream.own, upstream.reason = "up", models, own, ""
        upstream.times = {model: each.times for model, each in figures.items()}
        upstream.contexts = {model: each.context for model, each in figures.items()}
        for model, each in figures.items():
            upstream.cache.resize(self._router(upstream.place.pool, model).index, each.cache_tokens)
        self.changed(upstream)
        self.freed()

    def down(self, upstream: Upstream, reason: str) -> None:
        """The upstream does not answer; neither will what was asked of it. What comes back is
        another, as far as is known."""
        self._wake(upstream)
        if upstream.state in ("up", "starting") and upstream.reason != reason:
            LOG.warning("%s", reason)
        if upstream.state != "draining":
            upstream.state = "down"
        upstream.reason = reason
        self.changed(upstream)
        self._cut(upstream, "does not answer any longer")

    def _cut(self, upstream: Upstream, why: str) -> None:
        for cut in list(upstream.cut):
            cut(why)

    def _withdraw(self, upstream: Upstream, models: Collection[str]) -> None:
        if models:
            upstream.cache.forget()
        for model in models:
            if (router := self._routers.get((upstream.place.pool, model))) is not None:
                router.remove(upstream.id)
                if not len(router.fleet):
                    del self._routers[upstream.place.pool, model]

    def changed(self, upstream: Upstream) -> None:
        """Something of an upstream has changed, which routers hear of before the next choice."""
        if self._all.get(upstream.id) is upstream:  # one of that name may have come in its place
            self._changed[upstream.id] = upstream

    def _take_over(self) -> None:
        """Tells routers of the upstreams that have changed, as these are now."""
        changed, self._changed = self._changed, {}
        for name, upstream in changed.items():
            if upstream.breaker.state == "closed":
                self._tripped.pop(name, None)
            else:
                self._tripped[name] = upstream
            for model in upstream.models:
                figures = upstream.figures(self._places, model)
                self._router(upstream.place.pool, model).fleet.put(figures)

    def _broken(self) -> set[str]:
        return {name for name, up in self._tripped.items() if not up.breaker.available}

    def _router(self, pool: str, model: str) -> Router:
        key = pool, model
        if key not in self._routers:
            self._routers[key] = Router(self._policy, ReplicaPrefixes(MOST_SENT), self._clock)
        return self._routers[key]

    @property
    def models(self) -> dict[str, Upstream]:
        """Every model that is known to be served, with one who serves it."""
        found = {model: up for up in self if up.state == "up" for model in up.models}
        found.pop(ANY, None)
        return found

    def choose(
        self, pool: str, model: str, ask: Ask, barred: Collection[str] = (), broken: bool = False
    ) -> Selection:
        """The upstream of a pool for a request. barred: not these. broken: one whose breaker is
        open will do."""
        self._take_over()
        routers = self._serving(pool, model)
        kept_out = barred if broken else {*barred, *self._broken()}
        if (found := self._first(routers, ask, kept_out)) is not None:
            return Selection(self._lease(*found, model, ask))
        full = any(len(r.fleet.those("full", kept_out)) for r in routers)
        return Selection(None, known=bool(routers), full=full)

    def _serving(self, pool: str, model: str) -> list[Router]:
        """Of those of a pool who say that they serve a model, and of those who may."""
        found = (self._routers.get((pool, name)) for name in (model, ANY))
        return [router for router in found if router is not None]

    def _first(
        self, routers: list[Router], ask: Ask, barred: Collection[str]
    ) -> tuple[Router, str] | None:
        """The upstream that the first of the routers chooses which has one, by its id."""
        for router in routers:
            if (route := router.choose(ask, barred)) is not None:
                return router, route.replica
        return None

    def _lease(self, router: Router, replica: str, model: str, ask: Ask) -> UpstreamLease:
        upstream = self._all[replica]
        router.images.sent(upstream.id, ask.images)
        held = upstream.cache.begin(router.index, ask)
        lease = UpstreamLease(self, upstream, upstream.called(model), ask, held)
        self.changed(upstream)
        return lease

    def explain(self, pool: str, model: str, ask: Ask) -> list[Candidate]:
        """What a request costs at every upstream of a pool."""
        self._take_over()
        broken = self._broken()
        return [c for router in self._serving(pool, model) for c in router.explain(ask, broken)]
