"""The requests that an engine has, and what each of them holds until it ends."""

from __future__ import annotations

from octavo.backends.base import Adapters
from octavo.engine.grammar_queue import GrammarQueue
from octavo.engine.scheduler import Scheduler
from octavo.engine.search import BeamSearches
from octavo.engine.sequence import Sequence


class RequestTable:
    """Sequences by request id; of a beam search the one it began with."""

    def __init__(
        self,
        scheduler: Scheduler,
        searches: BeamSearches,
        compiling: GrammarQueue | None,
        adapters: Adapters | None,
    ) -> None:
        self._scheduler = scheduler
        self._searches = searches
        self._compiling = compiling
        self._adapters = adapters
        self._sequences: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def __getitem__(self, request_id: str) -> Sequence:
        return self._sequences[request_id]

    def add(self, sequence: Sequence) -> None:
        """Adds a request, whose adapter, if it has one, is acquired already."""
        self._sequences[sequence.id] = sequence

    def expired(self, now: float) -> list[Sequence]:
        """Requests whose deadline has passed."""
        return [s for s in self._sequences.values() if s.deadline is not None and now >= s.deadline]

    def complete(self) -> list[Sequence]:
        """Requests that have all that they want before they draw a token: replays, and prompts that
        are scored or only computed."""
        return [
            s
            for s in self._sequences.values()
            if s.full and not (s.needs_prompt_logprobs or s.needs_prompt or s.request.pool)
        ]

    def finish(self, sequence: Sequence) -> None:
        """Removes a request; its adapter may be unloaded then."""
        if self._sequences.pop(sequence.id, None) is not None and sequence.adapter >= 0:
            assert self._adapters is not None
            self._adapters.release(sequence.request.adapter)

    def free(self, request_id: str) -> Sequence:
        """Removes a request that is not complete and frees its blocks."""
        sequence = self._sequences[request_id]
        self.finish(sequence)
        compiling = self._compiling is not None and self._compiling.remove(sequence)
        if not compiling and not self._searches.free(request_id):
            self._scheduler.free(sequence)
        return sequence
