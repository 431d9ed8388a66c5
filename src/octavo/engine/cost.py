"""What speculation costs and brings, measured while it runs, and how deep to speculate.

Verifying a row more costs the difference between the times of two steps; it brings a token with the
chance that it and all before it are drawn. Both are measured: times by the rows of a step, chances
by comparing every proposal with what was drawn then, whether it was verified or not. So a source
that is not used goes on being judged, at no cost.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence

from octavo.engine.drafts import FORCED, FREE, GOES_ON, LONGEST_MATCH, Proposal
from octavo.engine.limits import MAX_DRAFT

ROW = 0.2  # what a row takes, of what a step takes without rows, before that is measured
MOST_ROW = 1.0  # the most of it that is believed: what takes longer was held up
NEWEST = 0.15  # weight of the latest time of a step
OUTLIER = 2.0  # times what is known: a longer step was held up by something else
TRUST = 5.0  # seconds after which half of a measured time is believed: trying it again costs little
ROW_TRUST = 100.0  # the same for what a row takes, which all times tell of
GRACE = 0.6  # of a step that a request may lose before drafts have brought it anything: a row
# takes at most half of one where MOST_ROW is believed, and so can be tried always
LEAST_GAIN = 1.1  # tokens a second, against those of plain steps: chances are guesses
PRIOR = {2: 0.25, 3: 0.4, 4: 0.55, 6: 0.7, 9: 0.8, LONGEST_MATCH: 0.9}  # by least match
_CLASSES = [max(m for m in PRIOR if m <= max(match, 2)) for match in range(LONGEST_MATCH + 1)]
LEAST_CHANCE = 0.03  # of a token to be drawn that is looked at
PRIOR_WEIGHT = 4.0  # tokens that what is known beforehand counts for
MEMORY = 0.997  # of what was seen, after a token more: half is forgotten after 230
OWN_MEMORY = 0.98  # the same for one request, whose text changes its kind
ANY = 0  # class of all tokens of a draft model
_Key = tuple[str, int, int]  # source, class of match or probability, place
BELIEVED = 0.7  # chance of any of them, before it is measured


class StepTimes:
    """Seconds of a step by the rows it computes.

    Of rows that were not measured, a part that every step takes and one for each row are supposed,
    whose ratio is learned from those that were: it is 0.1 where weights are what takes time, and
    near 1 where arithmetic is.
    """

    def __init__(self) -> None:
        self._mean: dict[int, float] = {}
        self._when: dict[int, float] = {}
        self._rows: list[int] = []  # that were measured, ascending
        self._row: float | None = None  # what a row takes, of what a step takes without rows
        self._learned = 0.0  # when that was

    def record(self, rows: int, seconds: float, now: float) -> None:
        """Takes the time of a step that ended now."""
        known = self._mean.get(rows)
        if known is None:
            if self._rows:
                near = self._near(rows)
                seconds = min(seconds, max(OUTLIER * self._mean[near], self._scaled(near, rows)))
            insort(self._rows, rows)
            self._mean[rows] = seconds
        else:
            self._mean[rows] += NEWEST * (min(seconds, OUTLIER * known) - known)
        self._when[rows] = now
        self._learn(rows, now)

    def _learn(self, rows: int, now: float) -> None:
        """Learns what a row takes from the times of this step and of the smallest."""
        least = self._rows[0]
        if rows == least:
            return
        ratio = self._mean[rows] / self._mean[least]
        fixed = rows - ratio * least
        row = min(MOST_ROW, max(0.0, ratio - 1) / fixed) if fixed > 0 else MOST_ROW
        self._row = row if self._row is None else self._row + NEWEST * (row - self._row)
        self._learned = now

    def _near(self, rows: int) -> int:
        """The largest of the rows measured that is not larger, else the smallest."""
        return self._rows[max(bisect_right(self._rows, rows) - 1, 0)]

    def _scaled(self, near: int, rows: int, row: float = MOST_ROW) -> float:
        """What `rows` rows take, if a row takes `row`, by the time of `near` rows."""
        return self._mean[near] * (1 + row * rows) / (1 + row * near)

    def plain(self, rows: int) -> float | None:
        """The time of a step without drafts; None before any was measured."""
        if not self._rows:
            return None
        return self._scaled(self._near(rows), rows, ROW if self._row is None else self._row)

    def estimate(self, rows: int, plain: int, now: float) -> float:
        """The time of a step of `rows` rows, of which `plain` are no drafts.

        What was measured long ago gives way to what is supposed, so that a step that was held up
        once is tried again.
        """
        base = self.plain(plain)
        assert base is not None
        row = ROW
        if self._row is not None:
            row += math.exp2((self._learned - now) / ROW_TRUST) * (self._row - ROW)
        supposed = base * (1 + row * rows) / (1 + row * plain)
        at = bisect_left(self._rows, rows)
        above = self._rows[at] if at < len(self._rows) else None
        if above == rows:
            measured, when = self._mean[rows], self._when[rows]
        elif at and above is not None and self._rows[at - 1] >= plain:
            below = self._rows[at - 1]
            share = (rows - below) / (above - below)
            measured = (1 - share) * self._mean[below] + share * self._mean[above]
            when = min(self._when[below], self._when[above])
        else:
            return supposed
        trust = math.exp2((when - now) / TRUST)
        return max(base, trust * measured + (1 - trust) * supposed)


class Acceptance:
    """How often proposed tokens were drawn, by source and length of the match.

    known: what is believed before anything is seen: a table of more requests.
    """

    def __init__(self, known: Acceptance | None = None) -> None:
        self._known = known
        self._keep = MEMORY if known is None else OWN_MEMORY
        self._seen: dict[_Key, tuple[float, float]] = {}  # drawn, proposed

    def chance(self, source: str, match: int, place: int = FREE) -> float:
        """The chance that a token is drawn, if those before it in the proposal were."""
        return self._chance((source, _CLASSES[min(match, LONGEST_MATCH)], place))

    def any(self, source: str) -> float:
        """The chance of a token that a draft model has yet to write."""
        return self._chance((source, ANY, FREE))

    def _chance(self, key: _Key) -> float:
        if key[0] == FORCED:
            return 1.0
        believed = self._known._chance(key) if self._known is not None else _prior(key[1])
        drawn, proposed = self._seen.get(key, (0.0, 0.0))
        return (drawn + PRIOR_WEIGHT * believed) / (proposed + PRIOR_WEIGHT)

    def chances(self, proposal: Proposal, most: int = MAX_DRAFT) -> list[float]:
        """For each token of a proposal, the chance that it and all before it are drawn, up to those
        that are hardly worth a row, of the first `most`."""
        out, chance = [], 1.0
        for i in range(min(most, len(proposal.tokens))):
            chance *= self._chance(_key(proposal, i))
            if chance < LEAST_CHANCE:
                break
            out.append(chance)
        return out

    def compare(self, proposal: Proposal, drawn: Sequence[int]) -> None:
        """Takes what was drawn where `proposal` was made."""
        for i, (token, proposed) in enumerate(zip(drawn, proposal.tokens, strict=False)):
            self._count(_key(proposal, i), token == proposed)
            if proposal.likely:
                self._count((proposal.source, ANY, FREE), token == proposed)
            if token != proposed:
                break
        if self._known is not None:
            self._known.compare(proposal, drawn)

    def _count(self, key: _Key, right: bool) -> None:
        drawn, seen = self._seen.get(key, (0.0, 0.0))
        self._seen[key] = (self._keep * drawn + right, self._keep * seen + 1)


def _class_of(likely: float) -> int:
    """Of tokens that a draft model gave about this probability: -1 to -10."""
    return -1 - min(9, int(10 * likely))


def _key(proposal: Proposal, i: int) -> _Key:
    if proposal.likely:
        return proposal.source, _class_of(proposal.likely[i]), FREE
    place = GOES_ON if i and proposal.place != FREE else proposal.place
    return proposal.source, _CLASSES[min(proposal.match + i, LONGEST_MATCH)], place


def _prior(evidence: int) -> float:
    """What is believed of a class before anything is seen: that a draft model is right."""
    if evidence == ANY:
        return BELIEVED
    return PRIOR[evidence] if evidence > 0 else (-evidence - 0.5) / 10


class CostModel:
    """Chooses how many tokens of each proposal a step verifies: as many as give most tokens a
    second, none if plain steps do."""

    def __init__(self) -> None:
        self.times = StepTimes()

    def depths(self, chances: list[list[float]], rows: int, room: int, now: float) -> list[int]:
        """For each sequence, the tokens of its proposal to verify.

        chances: of each token of each proposal, descending; first those of the sequences, then
        those of forks. rows: of the step without drafts: one a sequence. room: most rows to add.
        """
        out = [0] * len(chances)
        for i in self._best(chances, rows, room, now)[1]:
            out[i] += 1
        return out

    def affordable(self, rows: int, now: float, allowance: float, most: int) -> int:
        """How many of `most` tokens of a proposal may all be wrong, so that no text makes a request
        lose more than a little.

        rows: see `depths`. allowance: seconds that speculation may lose, but for what it begins
        with.
        """
        if (plain := self.times.plain(rows)) is None:
            return most
        limit, count = plain + allowance + GRACE * plain / rows, 0
        while count < most and self.times.estimate(rows + count + 1, rows, now) <= limit:
            count += 1
        return count

    def ahead(
        self, likely: list[float], chances: list[list[float]], rows: int, room: int, now: float,
        cost: Callable[[int], float], most: int,
    ) -> int:  # fmt: skip
        """How many tokens, `most` at most, a draft model is to write for each sequence it serves;
        0: it is not asked, because plain steps or what is proposed at no cost give more tokens a
        second.

        likely: for each of those sequences, the chance that a token is drawn. chances, rows, room:
        see `depths`. cost: seconds that it takes for so many tokens.
        """
        if self.times.plain(rows) is None:
            return 0
        best, depth = self._best(chances, rows, room, now)[0], 0
        expected, chain = float(len(chances)), [1.0] * len(likely)
        for k in range(1, min(most, room // len(likely)) + 1):
            chain = [a * b for a, b in zip(chain, likely, strict=True)]
            expected += sum(chain)
            rate = expected / (self.times.estimate(rows + k * len(likely), rows, now) + cost(k))
            if rate > best:
                best, depth = rate, k
        return depth

    def _best(
        self, chances: list[list[float]], rows: int, room: int, now: float
    ) -> tuple[float, list[int]]:
        """Most tokens a second, and the sequences of which a token more each is verified for it."""
        if (base := self.times.plain(rows)) is None:
            return 0.0, []
        best, expected, kept = LEAST_GAIN * rows / base, float(rows), 0
        taken: list[int] = []  # sequences, in the order in which tokens of theirs are added
        heap = [(-c[0], i, 0) for i, c in enumerate(chances) if c]
        heapq.heapify(heap)
        while heap and len(taken) < room:
            chance, i, depth = heapq.heappop(heap)
            expected -= chance
            taken.append(i)
            if depth + 1 < len(chances[i]):
                heapq.heappush(heap, (-chances[i][depth + 1], i, depth + 1))
            rate = expected / self.times.estimate(rows + len(taken), rows, now)
            if rate > best:
                best, kept = rate, len(taken)
        return best, taken[:kept]
