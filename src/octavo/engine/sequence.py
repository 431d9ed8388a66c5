"""A request in progress: tokens known, tokens computed, blocks held."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from octavo.backends.base import BLOCK, SamplingRow
from octavo.engine.request import Request

MASK64 = (1 << 64) - 1


@dataclass(eq=False, slots=True)
class Sequence:
    """`computed` catches up with `len(tokens)`; when it has, the next token is sampled."""

    request: Request
    arrival: int
    deadline: float | None
    limit: int  # most tokens, prompt included
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    indexed: int = 0  # whole blocks handed to the prefix index
    cached: int = 0  # prompt tokens found in the cache at first admission
    admitted: bool = False
    counts: Counter[int] = field(default_factory=Counter)  # generated tokens

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def pending(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return len(self.tokens) - self.computed

    @property
    def rank(self) -> tuple[int, float, int]:
        """Scheduling order: priority, then deadline, then arrival."""
        return (self.request.priority, self.deadline or float("inf"), self.arrival)

    def blocks_for(self, tokens: int) -> int:
        return (tokens + BLOCK - 1) // BLOCK

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.counts[token] += 1

    def sampling(self) -> SamplingRow:
        """Parameters for the next token; its random number depends on seed and position alone."""
        p = self.request.params
        return SamplingRow(
            temperature=p.temperature,
            top_p=p.top_p,
            min_p=p.min_p,
            top_k=p.top_k,
            logprobs=-1 if p.logprobs is None else p.logprobs,
            seed=(p.seed or 0) & MASK64,
            position=len(self.tokens),
            adjustments=self._adjustments(),
        )

    def _adjustments(self) -> list[tuple[int, float, float]]:
        p = self.request.params
        if not (
            p.logit_bias or p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1
        ):
            return []
        touched = set(p.logit_bias) | set(self.counts)
        repeated: set[int] = set()
        if p.repetition_penalty != 1:
            repeated = set(self.tokens)
            touched |= repeated
        out = []
        for token in sorted(touched):
            count = self.counts.get(token, 0)
            add = p.logit_bias.get(token, 0.0) - p.frequency_penalty * count
            if count:
                add -= p.presence_penalty
            out.append((token, add, p.repetition_penalty if token in repeated else 1.0))
        return out
