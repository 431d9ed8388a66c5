"""Which version of a model and which variant of an experiment a request gets, and who hears of its
end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

import msgspec

from octavo.errors import DeadlineExceeded
from octavo.experiments.bodies import altered
from octavo.experiments.controller import Chosen, Experiments
from octavo.experiments.spec import Unit, Variant
from octavo.gateway.body import OPERATIONS, Outline, Relayed
from octavo.gateway.config import Model
from octavo.gateway.events import Finished
from octavo.gateway.seen import Seen
from octavo.gateway.shadow import Shadow
from octavo.gateway.token_limits import most_tokens
from octavo.gateway.upstream import Cut
from octavo.release.controller import Assigned, Releases
from octavo.release.events import RequestEvent
from octavo.release.store import Release
from octavo.release.tally import STABLE
from octavo.server.exchange import Exchange
from octavo.server.guard import Principal
from octavo.server.parsing import NOT_JSON

OTHER = Model()  # that are not named
GONE = 499  # the status of requests whose clients have left
SESSION, UNIT = "x-session-id", "x-experiment-unit"
WRITING = (*OPERATIONS["chat"], *OPERATIONS["text_completion"])  # routes
NOT_ASKED = (401, 403, 413, 429, GONE)  # says nothing of the version


class Dealt(msgspec.Struct, frozen=True):
    """Where a request goes. route: of its model; seen: reads the answer, if somebody wants to know
    of it. prompt: its tokens, about, before a variant changed it: what an answer says of them says
    something of who gave it, and errors say nothing."""

    model: str
    route: Model
    assigned: Assigned | None = None
    chosen: Chosen | None = None
    seen: Seen | None = None
    prompt: int = 0
    only: str = ""  # the pool that can answer it, where no other can
    rolled_back: bool = False  # its version was, before it was answered

    @property
    def pools(self) -> tuple[str, ...]:
        """That which it goes to, and those for when nobody in it can: first the old version's."""
        if self.only:
            return (self.only,)
        if (assigned := self.assigned) is None:
            return self.route.pool, *self.route.fallback
        if self.rolled_back:
            return assigned.stable, *self.route.fallback
        old = (assigned.stable,) if assigned.watched and assigned.stable != assigned.pool else ()
        return assigned.pool, *old, *self.route.fallback

    def kept_in(self, pool: str) -> Dealt:
        """The same for a request that only an upstream of this pool can answer. If that is another
        version, nobody learns from it."""
        same = pool == self.pools[0]
        assigned, seen = (self.assigned, self.seen) if same else (None, None)
        return msgspec.structs.replace(self, only=pool, assigned=assigned, seen=seen)

    @property
    def version(self) -> str:
        """What a release calls who answers, "" where there was none."""
        return "" if self.assigned is None else self.assigned.arm

    def headers(self, pool: str) -> dict[str, str]:
        """What the client is told of it. pool: who answers."""
        found = {} if self.assigned is None else {"x-version": self.version}
        if self.assigned is not None and pool == self.assigned.stable != self.assigned.pool:
            found = {"x-version": STABLE}
        return found if self.chosen is None else found | {"x-variant": self.chosen.name}

    def body(self, body: bytes, path: str) -> bytes:
        """A body as its variant wants it. path: of its route; where no text is written, nothing but
        the model is another."""
        if self.chosen is None:
            return body
        variant = self.chosen.variant
        if path not in WRITING:
            variant = Variant(weight=variant.weight, model=variant.model)
        return altered(body, variant)


def _trial(dealt: Dealt, pool: str) -> Assigned | None:
    """What a release has said of a request that a pool is asked, if that is its canary's and the
    old version could answer as well."""
    assigned = dealt.assigned
    if assigned is None or not assigned.watched or dealt.only or dealt.rolled_back:
        return None
    return assigned if pool == assigned.pool == assigned.canary else None


def units_of(
    given: Mapping[str, str], outline: Outline, sender: Principal, one: Exchange
) -> dict[Unit, str]:
    """Who sends a request, the most lasting first; what is not known is empty. given: headers."""
    named = ""
    if bytes(outline.user):
        with suppress(*NOT_JSON):
            named = msgspec.json.decode(outline.user, type=str)
    return {
        "header": given.get(UNIT, ""),
        "user": named,
        "session": given.get(SESSION, ""),
        "key": sender.salt,
        "request": one.id,
    }


class Traffic:
    """models: which pools serve them. known: whether there is such a pool. shadow: compares
    versions. clock: seconds since 1970, as the releases have it."""

    def __init__(
        self, releases: Releases, experiments: Experiments, shadow: Shadow,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.models: Mapping[str, Model] = {}
        self.known: Callable[[str], bool] = lambda pool: True
        self._releases, self._experiments, self._clock = releases, experiments, clock
        self._shadow = shadow
        # requests that a canary has not answered yet: where each goes, by what ends it
        self._unanswered: dict[Cut, tuple[Dealt, str]] = {}
        releases.changed = self._cut_rolled_back

    def deal(self, model: str, units: Mapping[Unit, str], prompt: int = 0) -> Dealt:
        """Where a request for a model goes. units: who sends it, the most lasting first. prompt:
        its tokens, about."""
        chosen = self._experiments.assign(model, units)
        if chosen is not None and chosen.variant.model is not None:
            model = chosen.variant.model
        # Not by the key: most have one for all that they send, which would be one unit.
        unit = next(name for kind, name in units.items() if kind != "key" and name)
        assigned = self._releases.assign(model, unit)
        if assigned is not None and not self.known(assigned.pool):
            assigned = self._without(assigned)
        watched = chosen is not None or (assigned is not None and assigned.watched)
        route = self.models.get(model, OTHER)
        return Dealt(model, route, assigned, chosen, Seen() if watched else None, prompt)

    def _without(self, assigned: Assigned) -> Assigned | None:
        """Who answers where there is no such pool: while a release goes on the old version, of
        which nobody learns, as another gateway may have that pool; else the model's own pool."""
        if not (assigned.watched and self.known(assigned.stable)):
            return None
        return replace(assigned, pool=assigned.stable, arm=STABLE, watched=False)

    def serving(self, model: str, last: Release | None) -> str:
        """The pool that serves a model, whose last release was this and has ended."""
        if last is not None and self.known(last.winner):
            return last.winner
        return self.models.get(model, OTHER).pool

    def sent(self, dealt: Dealt, pool: str, cut: Cut) -> None:
        """A pool is sent a request. cut: is called if its version is rolled back before
        `answered`."""
        if _trial(dealt, pool) is not None:
            self._unanswered[cut] = dealt, pool

    def answered(self, cut: Cut) -> None:
        """The answer to what was `sent` has begun, or there will be none."""
        self._unanswered.pop(cut, None)

    def rolled_back(self, dealt: Dealt, pool: str) -> bool:
        """Whether a pool has a version that was rolled back since a request was dealt to it."""
        if (assigned := _trial(dealt, pool)) is None:
            return False
        last = self._releases.last(dealt.model)
        if last is None or last.id == assigned.release:
            return last is not None and last.state.phase == "rolled_back"
        return last.spec.stable != pool  # a later release knows which of both it was

    def _cut_rolled_back(self, release: Release) -> None:
        for cut, (dealt, pool) in list(self._unanswered.items()):
            if self.rolled_back(dealt, pool):
                cut("has a version that was rolled back")

    def ended(
        self, dealt: Dealt, asked: Relayed, one: Finished, cached: int, batch: int, down: bool
    ) -> None:
        """A request has ended. cached: tokens of its prompt; batch: requests beside it. down: none
        of its version's upstreams is up."""
        if dealt.seen is None or one.status in NOT_ASKED or one.code == "shutting_down":
            return
        assigned, seen = None if dealt.rolled_back else dealt.assigned, dealt.seen
        elsewhere = assigned is not None and one.pool not in ("", assigned.pool)
        good = one.status == 200
        late = one.status == DeadlineExceeded.status
        event = RequestEvent(
            arm=dealt.version, at=self._clock(),
            step=0 if assigned is None else assigned.step,
            failed=one.status >= 500 or late,
            refused=400 <= one.status < 500 and not late, ttft=one.ttft if good else None,
            itl=one.itl if good else None, tokens=one.completion_tokens,
            empty=good and seen.empty and most_tokens(asked) != 0,
            repeating=good and seen.repeating,
            prompt_tokens=dealt.prompt, cached_tokens=cached, batch=batch,
        )  # fmt: skip
        if dealt.chosen is not None:
            self._experiments.observe(dealt.chosen, event)
        no_place = elsewhere and not (one.retries or down)  # which is no fault of its version
        if assigned is not None and assigned.watched and not no_place:
            if elsewhere:  # a fault of the version's, whatever the other one answered
                event = replace(
                    event, failed=True, ttft=None, itl=None, empty=False, repeating=False
                )
            self._releases.observe(dealt.model, assigned, event)
            if good and not elsewhere and assigned.shadow:
                self._shadow.answered(asked, dealt.model, assigned)
