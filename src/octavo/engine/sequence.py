"""A request in progress: tokens known, tokens computed, blocks held."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import cast

import msgspec
import numpy as np

from octavo.backends.base import BLOCK, Floats, SamplingRow
from octavo.engine.canonical import Mask, mask_of, tokens_of
from octavo.engine.constraint import Constraint
from octavo.engine.events import Times
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
    times: Times = Times()
    counts: Counter[int] = field(default_factory=Counter)  # generated tokens
    eos: frozenset[int] = frozenset()
    vocabulary: int = 0
    adapter: int = -1  # slot
    salt: str = ""  # sets its cached prefixes apart
    allowed: Mask | None = None  # allowed_token_ids
    constraint: Constraint | None = None
    continuations: int = 0  # of a beam: how many are looked at
    pooled: Floats | None = None  # the sum of states so far
    scored: int = 1  # prompt tokens whose log-probabilities have been reported, the first included
    _mask: Mask | None = None

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
        """A token that was generated. Raises ValueError for one that the grammar does not allow."""
        self.tokens.append(token)
        self.counts[token] += 1
        self._mask = None
        if self.constraint is not None:
            self.constraint.push(token)

    def sampled(self, now: float) -> Times:
        """Notes the time of a token, and gives all times."""
        queued, admitted, first, _ = msgspec.structs.astuple(self.times)
        self.times = Times(queued, admitted, first or now, now)
        return self.times

    def fork(self) -> Sequence:
        """A copy that has computed nothing and holds no blocks."""
        constraint = self.constraint.fork() if self.constraint else None
        return replace(
            self, tokens=list(self.tokens), counts=Counter(self.counts), constraint=constraint,
            blocks=[], computed=0, indexed=0,
        )  # fmt: skip

    @property
    def unscored(self) -> bool:
        """Prompt tokens are left whose log-probabilities were asked for."""
        return self.request.params.prompt_logprobs is not None and self.scored < len(
            self.request.prompt
        )

    def pool(self, states: Floats) -> None:
        """Adds states `[n, width]` of the next tokens, one by one: chunks of any size sum alike."""
        for state in states:
            self.pooled = state if self.pooled is None else self.pooled + state

    @property
    def vector(self) -> bytes:
        """What was asked for, fp32, when the whole prompt is computed."""
        assert self.pooled is not None
        count = len(self.request.prompt) if self.request.pool == "mean" else 1
        return (self.pooled / np.float32(count)).astype(np.float32).tobytes()

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    def banned(self) -> set[int]:
        """Tokens that may not come next: ends before min_tokens, and last tokens of bad words."""
        p = self.request.params
        out = set(self.eos | set(p.stop_token_ids)) if self.generated < p.min_tokens else set()
        for *head, last in p.bad_words:
            if len(head) <= self.generated and self.tokens[len(self.tokens) - len(head) :] == head:
                out.add(last)
        return out

    def _closing(self) -> int | None:
        """The token that ends thoughts which have used up their budget."""
        if (thinking := self.request.params.thinking) is None:
            return None
        past, start = self.generated - thinking.budget, len(self.request.prompt)
        if not 0 <= past < len(thinking.closing):
            return None
        ended = thinking.closing[0] in self.tokens[start : start + thinking.budget]
        return None if ended else thinking.closing[past]

    def mask(self) -> Mask | None:
        """Tokens that may come next, None for all. Raises ValueError from the grammar."""
        if self._mask is None:
            self._mask = self._legal()
        return self._mask

    def _legal(self) -> Mask | None:
        if (token := self._closing()) is not None:
            return mask_of([token], (self.vocabulary + 31) // 32)
        mask = self.allowed
        if self.constraint is not None and not self.may_exit:
            legal = self.constraint.mask()
            mask = legal if mask is None else mask & legal
        if mask is not None and (banned := self.banned()):
            mask = mask.copy()
            for token in banned:
                mask[token >> 5] &= ~np.uint32(1 << (token & 31))
        if mask is not None and self.constraint is not None and not self.may_exit:
            mask = self.constraint.narrow(mask)
        return mask

    @property
    def narrowed_by(self) -> str | None:
        """The field of the request that keeps most tokens from being sampled."""
        p = self.request.params
        fields = ("grammar", "allowed_token_ids", "bad_words", "logit_bias", "min_tokens")
        return next((name for name in fields if getattr(p, name)), None)

    @property
    def may_exit(self) -> bool:
        """Whether the next token is drawn without the grammar, and may end the text by that."""
        p = self.request.params
        wanted = p.grammar_exit and p.beam is None and self.generated >= p.min_tokens
        return wanted and self.constraint is not None and self.constraint.complete

    def exits(self, token: int) -> bool:
        """Whether a token that was drawn leaves the grammar."""
        return self.may_exit and not cast(Constraint, self.constraint).allows(token)

    def forced(self) -> int | None:
        """The only token that may come next, if there is just one."""
        if (mask := self.mask()) is None or int(np.bitwise_count(mask).sum()) != 1:
            return None
        return tokens_of(mask)[0]

    @property
    def _penalized(self) -> bool:
        """Whether tokens that were generated change what comes next by penalties."""
        p = self.request.params
        return bool(p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1)

    @property
    def steady(self) -> bool:
        """Whether the next tokens are drawn by the same rules whatever the tokens before them."""
        p = self.request.params
        follows = self.constraint or p.beam or p.bad_words or p.thinking or self._penalized
        return not follows and self.generated >= p.min_tokens

    def sampling(self) -> SamplingRow:
        """Parameters for the next token; its random number depends on seed and position alone."""
        p = self.request.params
        mask = self.mask()
        return SamplingRow(
            temperature=p.temperature,
            top_p=p.top_p,
            min_p=p.min_p,
            typical_p=p.typical_p,
            top_k=p.top_k,
            logprobs=self.continuations or (-1 if p.logprobs is None else p.logprobs),
            legal=self.continuations > 0,
            seed=(p.seed or 0) & MASK64,
            position=len(self.tokens),
            adjustments=self._adjustments(self.banned() if mask is None else set()),
            mask=b"" if mask is None else mask.tobytes(),
        )

    def scoring(self, at: int) -> SamplingRow:
        """Asks for the log-probability of the prompt token at `at`."""
        wanted = self.request.params.prompt_logprobs
        assert wanted is not None
        return SamplingRow(logprobs=wanted, target=self.request.prompt[at])

    def _adjustments(self, banned: set[int]) -> list[tuple[int, float, float]]:
        p = self.request.params
        if not (p.logit_bias or self._penalized or banned):
            return []
        touched = set(p.logit_bias) | banned
        if self._penalized:
            touched |= set(self.counts)
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
            if token in banned:
                add = -math.inf
            out.append((token, add, p.repetition_penalty if token in repeated else 1.0))
        return out
