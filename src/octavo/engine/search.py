"""Beam searches in progress: forks their sequences, and reports the texts they found."""

from __future__ import annotations

from octavo.backends.base import BLOCK, Sample
from octavo.engine.beam import Beam, BeamGroup
from octavo.engine.events import BeamText
from octavo.engine.kv import blocks_for
from octavo.engine.scheduler import Scheduler
from octavo.engine.sequence import Sequence


class BeamSearches:
    """One BeamGroup per request. To the scheduler a beam is a sequence like any other.

    sequences: most that run together.
    """

    def __init__(self, scheduler: Scheduler, sequences: int) -> None:
        self._scheduler = scheduler
        self._sequences = sequences
        self._groups: dict[str, BeamGroup] = {}

    def width(self, sequence: Sequence) -> int:
        """Beams that fit into the KV cache together, sharing the prompt's blocks.

        Depends on the request and the cache's size alone, so that a busy engine finds the same
        texts.
        """
        assert sequence.request.params.beam is not None
        shared = len(sequence.request.prompt) // BLOCK
        own = blocks_for(sequence.limit) - shared
        fitting = (self._scheduler.kv.capacity - shared) // max(1, own)
        return max(1, min(sequence.request.params.beam.width, fitting, self._sequences))

    def begin(self, sequence: Sequence) -> None:
        """Starts a search from a sequence that holds the prompt."""
        params = sequence.request.params
        assert params.beam is not None
        width = self.width(sequence)
        ends = len(sequence.sampling.eos | set(params.stop_token_ids))
        candidates = width * max(2, 1 + ends)
        group = BeamGroup(params.beam, width, sequence.limit, candidates)
        group.live.append(Beam(sequence))
        sequence.sampling.candidates = candidates
        self._groups[sequence.id] = group

    def free(self, request_id: str) -> bool:
        """Ends a search and frees its blocks. Returns False if the request has none."""
        if (group := self._groups.pop(request_id, None)) is None:
            return False
        for beam in group.live:
            self._scheduler.free(beam.sequence)
        return True

    def commit(self, sequence: Sequence, sample: Sample) -> list[BeamText] | None:
        """Takes the candidates of one beam; when all beams have theirs, the search goes on.

        Returns the best texts once the search is over. Raises ValueError if a grammar fails.
        """
        group = self._groups[sequence.id]
        group.add_candidates(sequence, sample)
        if not group.ready:
            return None
        following = group.select()
        if not following:
            del self._groups[sequence.id]
            for beam in group.live:
                self._scheduler.finish(beam.sequence)
            return _texts(group, sequence)
        live: list[Beam] = []
        kept: set[Sequence] = set()
        for beam, score, choice in following:
            own = beam.sequence
            if own in kept:
                own = self._scheduler.fork(beam.sequence)
                group.live.append(Beam(own))  # to be freed if the next fork fails
            kept.add(own)
            live.append(Beam(own, score, (*beam.choices, choice)))
        for beam in group.live:
            if beam.sequence not in kept:
                self._scheduler.free(beam.sequence)
        group.live = live
        for beam in live:
            beam.sequence.append(beam.choices[-1].token)
            beam.sequence.sampling.mask()  # a failing grammar fails here
        return None


def _texts(group: BeamGroup, sequence: Sequence) -> list[BeamText]:
    found = group.finished[: group.params.n]
    alternatives = sequence.request.params.logprobs or 0
    return [
        BeamText(
            sequence.id, i, group.width,
            [c.token for c in h.choices], [c.logprob for c in h.choices],
            [c.top[:alternatives] for c in h.choices], h.score, h.finish,
            last=i + 1 == len(found), cached=sequence.cached, times=sequence.report(),
        )
        for i, h in enumerate(found)
    ]  # fmt: skip
