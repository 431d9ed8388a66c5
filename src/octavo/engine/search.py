"""Beam searches in progress: forks their sequences, and tells what they found."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from octavo.backends.base import BLOCK, Sample
from octavo.engine.beam import Beam, BeamGroup
from octavo.engine.events import BeamText, Ended, TokenEvent
from octavo.engine.request import SamplingParams
from octavo.engine.scheduler import Scheduler
from octavo.engine.sequence import Sequence

NO_TOKEN_LEFT = "no token is left that may follow"


class BeamSearches:
    """One BeamGroup per request. A beam is a sequence like any other to the scheduler.

    rows: most sequences that run together. ends: whether a token ends a text.
    """

    def __init__(
        self, scheduler: Scheduler, rows: int, ends: Callable[[SamplingParams, int], bool]
    ) -> None:
        self._scheduler = scheduler
        self._rows = rows
        self._ends = ends
        self._groups: dict[str, BeamGroup] = {}

    def width(self, sequence: Sequence) -> int:
        """Beams that fit into the pool together, sharing the prompt's blocks, whatever else runs.

        It depends on the request and the pool alone, so that a busy engine finds the same texts.
        """
        assert sequence.request.params.beam is not None
        shared = len(sequence.request.prompt) // BLOCK
        own = sequence.blocks_for(sequence.limit) - shared
        room = (self._scheduler.index.capacity - shared) // max(1, own)
        return max(1, min(sequence.request.params.beam.width, room, self._rows))

    def begin(self, sequence: Sequence) -> None:
        """Starts a search from a sequence that holds the prompt."""
        params = sequence.request.params
        assert params.beam is not None
        width = self.width(sequence)
        looked_at = width * max(2, 1 + len(sequence.eos | set(params.stop_token_ids)))
        group = BeamGroup(
            params.beam, width, sequence.limit, looked_at, partial(self._ends, params)
        )
        group.live.append(Beam(sequence))
        sequence.continuations = looked_at
        self._groups[sequence.id] = group

    def remove(self, request_id: str) -> bool:
        """Ends a search, if there is one, and frees its blocks."""
        if (group := self._groups.pop(request_id, None)) is None:
            return False
        for beam in group.live:
            self._scheduler.remove(beam.sequence)
        return True

    def advance(self, sequence: Sequence, sample: Sample) -> list[TokenEvent]:
        """Takes what may follow one beam; when all have theirs, the search goes on by a token.

        Gives what was found once it is over. Raises ValueError when a grammar becomes too costly.
        """
        group = self._groups[sequence.id]
        group.offer(sequence, sample)
        if not group.ready:
            return []
        following = group.select()
        if not following:
            del self._groups[sequence.id]
            for beam in group.live:
                self._scheduler.retire(beam.sequence)
            return _found(group, sequence)
        live: list[Beam] = []
        kept: set[Sequence] = set()
        for beam, score, choice in following:
            own = beam.sequence
            if own in kept:
                own = self._scheduler.fork(beam.sequence)
            kept.add(own)
            live.append(Beam(own, score, (*beam.choices, choice)))
        for beam in group.live:
            if beam.sequence not in kept:
                self._scheduler.remove(beam.sequence)
        group.live = live
        for beam in live:
            beam.sequence.append(beam.choices[-1].token)
            beam.sequence.mask()
        return []


def _found(group: BeamGroup, sequence: Sequence) -> list[TokenEvent]:
    """The events of the best texts, one text after the other."""
    wanted = group.finished[: group.params.n]
    if not wanted:
        return [
            Ended(
                sequence.id, "refused", NO_TOKEN_LEFT, sequence.cached, sequence.times,
                sequence.narrowed_by, "constraint_failed",
            )
        ]  # fmt: skip
    shown = sequence.request.params.logprobs or 0
    return [
        BeamText(
            sequence.id, i, group.width,
            [c.token for c in h.choices], [c.logprob for c in h.choices],
            [c.top[:shown] for c in h.choices], h.score, h.finish,
            last=i + 1 == len(wanted), cached=sequence.cached, times=sequence.times,
        )
        for i, h in enumerate(wanted)
    ]  # fmt: skip
