"""How long steps take, and what each may hold, so that nobody's tokens come much later for others.

A step is measured by the texts that it continues and the tokens of prompts that it computes beside
them. What is planned follows from that and from nothing else; no result depends on it.
"""

from __future__ import annotations

import math
from collections import Counter

from octavo.engine.cost import OUTLIER, StepTimes
from octavo.engine.policy import SchedulingPolicy
from octavo.engine.sequence import Sequence
from octavo.engine.slowdown import Slowdown

OWN, OTHERS = 2.5, 1.5  # times what a tenant's texts take alone that a step with them takes: with
# prompts of its own, and with what others want
HALF = OWN / 2  # for each of two steps in which texts get one token
ONCE = 6.0  # where the whole prompt of who has less is computed, and the others' texts wait for it
EVEN = 0.013  # seconds between tokens below which nobody's texts are slowed: they come in bursts
COMPANY = 1.25 * EVEN  # seconds of a step with prompts of its own, where others may come any moment
LEAST = 4  # tokens of a prompt that a step computes, however long that takes
MANY = 16  # whose time says what each of many takes
NEWEST = 0.3  # weight of the latest time of a prompt's tokens


class Pace:
    """Seconds of steps, as measured."""

    def __init__(self) -> None:
        self._texts = StepTimes()
        self._slowdown = Slowdown()
        self.last = math.inf  # of the last step
        self.token = 0.0  # of a prompt's token
        self.prompt_token = 0.0  # of the same with all that was computed beside it
        self._computed = 0  # tokens of prompts since those were measured,
        self._seconds = 0.0  # of their steps,
        self._alone = 0.0  # and without the texts beside them

    def took(self, lengths: list[int], seconds: float, now: float) -> None:
        """Takes the time of a step that ended now, of spans of these lengths."""
        self.last = max(seconds, 1e-9)
        texts = lengths.count(1)
        prompt = sum(lengths) - texts
        beside = prompt * self.token
        if not prompt or (texts and 0 < beside < seconds / 2):
            self._slowdown.record(texts, seconds - beside, now)
            return self._texts.record(texts, seconds - beside, now)
        self._computed += prompt
        self._seconds += seconds
        self._alone += max(0.0, seconds - self.seconds(max(texts, 1)))
        if self._computed < MANY:
            return
        each = self._alone / self._computed
        known = self.token or each
        self.token = known + NEWEST * (min(each, OUTLIER * known) - known)
        each = self._seconds / self._computed
        known = self.prompt_token or each
        self.prompt_token = known + NEWEST * (each - known)
        self._computed, self._seconds, self._alone = 0, 0.0, 0.0

    def seconds(self, texts: int, prompt: int = 0) -> float:
        """What a step takes; 0 before any was measured."""
        return (self._texts.plain(texts) or 0.0) + prompt * self.token

    def stats(self, texts: int) -> dict[str, int]:
        """Of EngineStats, where so many texts run."""
        return {
            "step_us": int(1e6 * self.seconds(max(1, texts))),
            "slowdown_permille": int(1e3 * self._slowdown.times),
            "prompt_token_ns": int(1e9 * self.prompt_token),
        }

    def own(self, texts: int, times: float) -> float:
        """Seconds of a step in which so many texts take so many times what they take alone, for
        what their tenant wants."""
        return times * max(self.seconds(texts), EVEN)

    def others(self, texts: int, times: float) -> float:
        """Likewise for what others want: it is felt as soon as it is longer than EVEN."""
        return max(times * self.seconds(texts), EVEN)

    def fitting(self, seconds: float, texts: int, most: int) -> int:
        """Tokens of prompts that fit in so long a step beside texts, `most` at most."""
        left = max(0.0, seconds - self.seconds(texts))
        return int(left / self.token) if self.token * most > left else most


class StepBudget:
    """What a step may compute of each sequence.

    tokens: in all. waited: texts were left out of the last step for a prompt. company: others than
    those running may come at any moment, so that no step is to be long. crowded: not all that came
    have a place. held: what is left out of this step; pauses: texts for a prompt.

    The prompt of a tenant that had less work than others is computed before theirs, and before
    texts of those that run more than it does: they wait a step, but never two in a row. Where
    nobody else comes and nobody waits for a place, prompts that came before a tenant's texts began
    are not held back for these: all came together, and all begin sooner. Those with images waited
    for their encoder, and are.
    """

    def __init__(
        self, pace: Pace, policy: SchedulingPolicy, running: list[Sequence], tokens: int,
        waited: bool, company: bool, crowded: bool,
    ) -> None:  # fmt: skip
        self._pace, self._policy = pace, policy
        self._company = company
        self._own, self._others = (HALF, HALF) if waited else (OTHERS if company else OWN, OTHERS)
        self._prompts = 0  # tokens of prompts in this step
        texts = [s for s in running if s.kv.pending == 1]
        apart = len({s.request.tenant for s in running}) > 1
        self._first = self._owed(running) if apart and not waited else None
        self.held = set() if self._first is None else self._yielding(self._first, running)
        self.pauses = any(s.kv.pending == 1 for s in self.held)
        if apart:
            self.held |= self._beyond_share([s for s in texts if s not in self.held])
        self._rows = Counter([s.request.tenant for s in texts if s not in self.held])
        self._texts = self._rows.total()
        calm = not company and not crowded
        self._began = min((s.times.first_token for s in texts), default=0.0) if calm else 0.0
        self._tokens = self.left = tokens

    def _owed(self, running: list[Sequence]) -> Sequence | None:
        """The prompt that comes before what others want, if there is one."""
        prompts = [s for s in running if s.kv.pending > 1 and not s.images]
        if not prompts:
            return None
        first = min(prompts, key=self._policy.key)
        return first if any(self._policy.owed(first, s) for s in running) else None

    def _yielding(self, first: Sequence, running: list[Sequence]) -> set[Sequence]:
        """Prompts and texts that wait for the prompt that comes first."""
        counts = Counter(s.request.tenant for s in running)
        own = counts[first.request.tenant]
        return {
            s for s in running
            if self._policy.owed(first, s)
            and (s.kv.pending > 1 or counts[s.request.tenant] > own)
        }  # fmt: skip

    def _beyond_share(self, texts: list[Sequence]) -> set[Sequence]:
        """Texts of tenants that have many, where a step with all would be too long for who has
        fewest. Those that were computed longest ago are left in."""
        rows = Counter(s.request.tenant for s in texts)
        if len(rows) < 2:
            return set()
        limit = self._pace.others(min(rows.values()), OTHERS) - LEAST * self._pace.token
        most = max(rows.values())
        while most > min(rows.values()):
            if self._pace.seconds(sum(min(n, most) for n in rows.values())) <= limit:
                break
            most -= 1
        out, taken = set(), Counter[str]()
        for sequence in sorted(texts, key=lambda s: (s.step, self._policy.key(s))):
            taken[sequence.request.tenant] += 1
            if taken[sequence.request.tenant] > most:
                out.add(sequence)
        return out

    def room(self, sequence: Sequence) -> int:
        """Most tokens of a sequence that this step computes."""
        if sequence.kv.pending == 1 or not self.left:
            return self.left
        first = self._first
        if first is not None and sequence is not first and self._policy.owed(first, sequence):
            return 0
        return min(self.left, max(self._fitting(sequence) - self._prompts, 0))

    def _fitting(self, sequence: Sequence) -> int:
        """Tokens of prompts in this step, if the last of them are of this sequence's."""
        pace, tenant = self._pace, sequence.request.tenant
        rows, own, others = self._rows, self._own, self._others
        if sequence is self._first:
            rows = rows | Counter(s.request.tenant for s in self.held if s.kv.pending == 1)
            own = others = ONCE if self._at_once(sequence, rows) else HALF
        if not rows or (sequence.times.queued < self._began and not sequence.images):
            return self._tokens
        limit = min(
            pace.own(n, own) if t == tenant else pace.others(n, others) for t, n in rows.items()
        )
        if self._company and sequence is not self._first and pace.seconds(self._texts) < COMPANY:
            limit = min(limit, COMPANY)
        most = self._tokens // 2 if self._texts else self._tokens
        return min(most, max(LEAST, pace.fitting(limit, self._texts, most)))

    def _at_once(self, sequence: Sequence, rows: Counter[str]) -> bool:
        """Whether a prompt can be computed in one step of bearable length."""
        longest = min((self._pace.others(n, ONCE) for n in rows.values()), default=math.inf)
        kv = sequence.kv
        new = kv.computed == (kv.cached or 0)
        return new and self._pace.seconds(self._texts or 1, kv.pending) <= longest

    def take(self, sequence: Sequence, count: int) -> None:
        """So many tokens of a sequence are computed."""
        self.left -= count
        if sequence.kv.pending > 1:
            self._prompts += count
