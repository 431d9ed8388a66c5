"""What the next token of a sequence is sampled by, besides its logits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field, replace

from octavo.backends.base import SamplingRow
from octavo.engine import bitmask
from octavo.engine.bitmask import Mask
from octavo.engine.constraint import Constraint
from octavo.engine.limits import MAX_BLANK
from octavo.engine.request import SamplingParams, Thinking

MASK64 = (1 << 64) - 1
NO_TOKENS: frozenset[int] = frozenset()
Adjustment = tuple[int, float, float]  # token, addend, repetition penalty


@dataclass(eq=False, slots=True)
class SamplingState:
    """Sampling parameters of a request with the state they refer to.

    tokens: prompt and generated tokens, the list that the KV state has. prompt: length of the
    prompt. eos: tokens that end a text unless ignored. candidates: continuations that a beam
    search asks for, 0 without one. counts: of generated tokens, where penalties ask for them.
    """

    params: SamplingParams
    tokens: list[int]
    prompt: int
    vocabulary: int
    eos: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    candidates: int = 0
    counts: Counter[int] = field(default_factory=Counter)
    stop_tokens: frozenset[int] = frozenset()  # that end the text: those of the request, and `eos`
    masked: bool = False  # the next token may be masked
    _penalized: bool = False  # logits change with the tokens generated
    _allowed: Mask | None = None  # allowed_token_ids
    _mask: Mask | None = None  # of the next token, once it is known
    _later: list[tuple[int, Mask | None]] = field(default_factory=list)  # tokens of a draft, and
    # the masks after them, which need not be found again where those tokens are drawn
    _thoughts: int = -1  # where they begin that the reply opens, 0: nowhere; -1: not known yet
    _changed: dict[int, Adjustment] | None = None  # logits that biases and penalties change, by
    # token, once they have been asked for: a long text has thousands

    def __post_init__(self) -> None:
        p = self.params
        self.stop_tokens = frozenset(p.stop_token_ids) | (frozenset() if p.ignore_eos else self.eos)
        self.masked = any(x is not None for x in (p.allowed_token_ids, p.grammar, p.thinking))
        penalties = p.presence_penalty, p.frequency_penalty, p.repetition_penalty - 1
        self._penalized = any(penalties)
        if p.allowed_token_ids is not None and self._allowed is None:
            self._allowed = self._mask_of(p.allowed_token_ids)

    def _mask_of(self, tokens: list[int]) -> Mask:
        return bitmask.mask_of(tokens, bitmask.words_for(self.vocabulary))

    @property
    def generated(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - self.prompt

    def push(self, token: int) -> None:
        """Follows a token that was appended to `tokens`. Raises ValueError if the grammar does not
        allow it."""
        if self._penalized:
            self.counts[token] += 1
            if self._changed is not None:
                self._changed[token] = self._adjustment(token, True)
        follows = bool(self._later) and self._later[0][0] == token
        self._mask, self._later = (self._later[0][1], self._later[1:]) if follows else (None, [])
        if self.constraint is not None:
            self.constraint.push(token)

    def fork(self, tokens: list[int]) -> SamplingState:
        """An independent copy whose list of tokens is `tokens`."""
        constraint = self.constraint.fork() if self.constraint else None
        changed = None if self._changed is None else dict(self._changed)
        return replace(
            self, tokens=tokens, counts=Counter(self.counts), constraint=constraint,
            _changed=changed,
        )  # fmt: skip

    @property
    def independent(self) -> bool:
        """True if sampling does not depend on generated tokens."""
        p = self.params
        follows = self.constraint or p.beam or p.bad_words or p.thinking or self._penalized
        return not follows and self.generated >= p.min_tokens

    @property
    def restricted_by(self) -> str | None:
        """The field of the request that keeps most tokens from being sampled."""
        fields = ("grammar", "allowed_token_ids", "bad_words", "logit_bias", "min_tokens")
        return next((name for name in fields if getattr(self.params, name)), None)

    def mask(self) -> Mask | None:
        """Tokens that may come next, None for all. Raises ValueError if the grammar fails."""
        if self.masked and self._mask is None:
            self._mask = self._next_mask()
        return self._mask

    def _next_mask(self) -> Mask | None:
        if (token := self._closing_token()) is not None:
            return self._mask_of([token])
        mask = self._allowed
        constraint = None if self.may_leave_grammar else self.constraint
        if constraint is not None:
            legal = constraint.mask()
            mask = legal if mask is None else mask & legal
        if mask is not None and (banned := self._banned()):
            mask = bitmask.without(mask, banned)
        if mask is not None and constraint is not None:
            mask = constraint.narrow(mask)
        return mask

    def _banned(self) -> Set[int]:
        """Tokens that may not come next: ends before min_tokens, and last tokens of bad words."""
        p = self.params
        if not (p.min_tokens or p.bad_words):
            return NO_TOKENS
        early = self.generated < p.min_tokens
        banned = set(self.eos | set(p.stop_token_ids)) if early else set()
        for *head, last in p.bad_words:
            if len(head) <= self.generated and self.tokens[len(self.tokens) - len(head) :] == head:
                banned.add(last)
        return banned

    def _closing_token(self) -> int | None:
        """The next token of the thinking budget's closing text, if the budget is used up."""
        if (thinking := self.params.thinking) is None:
            return None
        if not (begin := self._opened(thinking)):
            return None
        past = len(self.tokens) - begin - thinking.budget
        if not 0 <= past < len(thinking.closing):
            return None
        thoughts = self.tokens[begin : begin + thinking.budget]
        return None if thinking.closing[0] in thoughts else thinking.closing[past]

    def _opened(self, thinking: Thinking) -> int:
        """Where thoughts begin; 0 where there are none, or none yet."""
        if thinking.opening is None:
            return self.prompt
        if self._thoughts < 0:
            reply = self.tokens[self.prompt : self.prompt + MAX_BLANK + 1]
            at = next((i for i, t in enumerate(reply) if t not in thinking.blank), len(reply))
            if at == len(reply) <= MAX_BLANK:
                return 0
            opens = reply[at : at + 1] == [thinking.opening]
            self._thoughts = self.prompt + at + 1 if opens else 0
        return self._thoughts

    @property
    def may_leave_grammar(self) -> bool:
        """True if the next token is sampled without the grammar, whose text is complete."""
        p = self.params
        if not p.grammar_exit or p.beam is not None or self.constraint is None:
            return False
        return self.generated >= p.min_tokens and self.constraint.complete

    def leaves_grammar(self, token: int) -> bool:
        """True if a sampled token is not of the grammar, which ends the text."""
        if self.constraint is None or not self.may_leave_grammar:
            return False
        return not self.constraint.allows(token)

    @property
    def jumps(self) -> bool:
        """True if tokens that a grammar forces need no step."""
        return self.constraint is not None and self.params.logprobs is None

    def jump_forward(self) -> int | None:
        """The next token where only one is legal: it needs no step. None if log-probabilities are
        wanted, which do."""
        if self.params.logprobs is not None or (mask := self.mask()) is None:
            return None
        return bitmask.tokens_of(mask)[0] if bitmask.count(mask) == 1 else None

    @property
    def forced_run(self) -> list[int]:
        """The tokens that the grammar forces next, where each of them needs a step."""
        if self.params.logprobs is None or self.constraint is None or self.may_leave_grammar:
            return []
        return self.constraint.forced_run

    def legal(self, draft: list[int]) -> list[int]:
        """The first tokens of a draft, up to one that the grammar does not allow."""
        if self.constraint is None or self.may_leave_grammar:
            return draft
        return draft[: self.constraint.allowed(draft)]

    def rows_after(self, draft: list[int]) -> list[SamplingRow]:
        """How to sample after each token of a draft, were it drawn; the first of them that may not
        come, ends the text or is followed by one that needs no step, and those after it have none.
        """
        end = next((i for i, t in enumerate(draft) if t in self.stop_tokens), len(draft))
        if self.independent:
            row = self.row()
            return [row._replace(position=row.position + 1 + i) for i in range(end)]
        state, rows, later = self.fork(list(self.tokens)), list[SamplingRow](), []
        for token in draft[:end]:
            constraint = state.constraint
            if constraint is not None and not constraint.allows(token):
                break
            try:
                state.tokens.append(token)
                state.push(token)
                if constraint is not None and constraint.finished:
                    break
                if state.jump_forward() is not None:
                    break  # the step would be saved anyway: nothing is won before the next choice
                rows.append(state.row())
                later.append((token, state._mask))
            except ValueError:  # the grammar has become too costly, as the step there will say
                break
        self._later = later
        return rows

    def row(self) -> SamplingRow:
        """How to sample the next token; its random number depends on seed and position alone."""
        p = self.params
        mask = self.mask()
        logprobs = self.candidates or (-1 if p.logprobs is None else p.logprobs)
        return SamplingRow(
            p.temperature, p.top_p, p.min_p, p.typical_p, p.top_k, logprobs, -1,
            self.candidates > 0, (p.seed or 0) & MASK64, len(self.tokens),
            self._adjustments(self._banned() if mask is None else NO_TOKENS),
            b"" if mask is None else mask.tobytes(),
        )  # fmt: skip

    def draft_row(self) -> SamplingRow:
        """How a draft model samples the next tokens: with the same random numbers, and without what
        depends on the tokens drawn."""
        p = self.params
        return SamplingRow(
            p.temperature, p.top_p, p.min_p, p.typical_p, p.top_k, logprobs=2,
            seed=(p.seed or 0) & MASK64, position=len(self.tokens),
        )  # fmt: skip

    def prompt_logprob_row(self, position: int) -> SamplingRow:
        """Asks for the log-probability of the prompt token at `position`."""
        assert self.params.prompt_logprobs is not None
        return SamplingRow(logprobs=self.params.prompt_logprobs, target=self.tokens[position])

    def _adjustments(self, banned: Set[int]) -> list[Adjustment]:
        """How logits change, of the tokens whose logits do."""
        p = self.params
        if self._changed is None:
            seen = set(self.tokens if p.repetition_penalty != 1 else self.counts)
            known = seen if self._penalized else set[int]()
            self._changed = {t: self._adjustment(t, t in known) for t in known | set(p.logit_bias)}
        never = {t: (t, -math.inf, 1.0) for t in banned}
        return list((self._changed | never if never else self._changed).values())

    def _adjustment(self, token: int, seen: bool) -> Adjustment:
        """How a token's logit changes. seen: it is one that penalties are for."""
        p, count = self.params, self.counts.get(token, 0)
        add = p.logit_bias.get(token, 0.0) - p.frequency_penalty * count
        if count:
            add -= p.presence_penalty
        return token, add, p.repetition_penalty if seen else 1.0
