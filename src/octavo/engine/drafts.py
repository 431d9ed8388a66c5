"""Sources of drafts: tokens that may come next, found without computing anything.

A draft is a guess. Whether it is drawn is decided by the model in the step that verifies it, so a
source can be as simple as it likes, and what it proposes changes no result.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from octavo.backends.base import Sample
from octavo.engine.limits import MAX_DRAFT
from octavo.engine.sequence import Sequence

LONGEST_MATCH = 16  # tokens of context compared
CHAIN = 64  # earlier occurrences looked at
INDEXED = 1 << 13  # tokens that are searched, of a prompt its last, of a prediction its first
RECENT_TOKENS = 1 << 14  # of recent replies, of all salts together
RECENT_SALTS = 64
FREE, BEGINS, GOES_ON = range(3)  # places: in any text; after what a grammar forced; after that
FORCED = "forced"  # source of what is always drawn
START = 8  # match of a prediction that is followed from its first token


class Proposal(NamedTuple):
    """Tokens that may follow. match: how many tokens before them are as they were where these were
    found; the longer, the likelier they are. likely: the probabilities that a draft model gave
    them; second: the likeliest other token in the place of each, with its own. place: of the first;
    those after a forced text begin a value, which often looks like others, and seldom is one."""

    source: str
    tokens: list[int]
    match: int
    likely: list[float] = []
    second: list[tuple[int, float]] = []
    place: int = FREE


def written(source: str, samples: list[Sample]) -> Proposal:
    """What a draft model drew, with two log-probabilities each."""
    second = []
    for s in samples:
        others = zip(s.top_tokens, s.top_logprobs, strict=True)
        token, logprob = next((pair for pair in others if pair[0] != s.token), (s.token, -math.inf))
        second.append((token, math.exp(logprob)))
    likely = [math.exp(min(0.0, s.logprob)) for s in samples]
    return Proposal(source, [s.token for s in samples], 0, likely, second)


class DraftSource(Protocol):
    """Proposes continuations."""

    name: str

    def propose(self, sequence: Sequence) -> Proposal | None:
        """Up to MAX_DRAFT tokens after the last of a sequence; None if it knows of none."""
        ...

    def finish(self, sequence: Sequence) -> None:
        """A sequence is complete."""
        ...


class NgramIndex:
    """Finds the longest earlier occurrence of the end of a text, as LZ77 compressors do.

    tokens: what is searched, which may grow. The places where a pair of tokens occurred are a
    chain, from the newest to the oldest, and the longest match of the newest CHAIN is taken, the
    newest of several. A suffix automaton would find the longest of all, for three to four times the
    time and a dictionary for each token.
    """

    def __init__(self, tokens: list[int], first: int = 0) -> None:
        self.tokens = tokens
        self._first = first  # what comes before is not searched
        self._newest: dict[int, int] = {}  # by pair: the place after it
        self._older: list[int] = []  # by place: the one before it in its chain, or 0

    def _grow(self) -> None:
        """Indexes the tokens that have come, all but the last, which nothing follows yet."""
        tokens, newest, older = self.tokens, self._newest, self._older
        for place in range(self._first + len(older) + 2, len(tokens)):
            pair = tokens[place - 2] << 32 | tokens[place - 1]
            older.append(newest.get(pair, 0))
            newest[pair] = place

    def find(self, tail: list[int]) -> tuple[int, int]:
        """The place after the longest match with the end of `tail`, and its length; (0, 0) if there
        is none of two tokens. `tail` may be `tokens` itself."""
        if len(tail) < 2:
            return 0, 0
        self._grow()
        tokens, older, back = self.tokens, self._older, self._first + 2
        place, best, longest = self._newest.get(tail[-2] << 32 | tail[-1], 0), 0, 1
        for _ in range(CHAIN):
            if not place or longest >= LONGEST_MATCH:
                break
            most = min(LONGEST_MATCH, place, len(tail))
            # A longer match than the best has the token before that, too.
            if longest < most and tokens[place - 1 - longest] == tail[-1 - longest]:
                length = 2
                while length < most and tokens[place - 1 - length] == tail[-1 - length]:
                    length += 1
                if length > longest:
                    best, longest = place, length
            place = older[place - back]
        return (best, longest) if best else (0, 0)

    def after(self, place: int) -> list[int]:
        """The tokens from `place` on; where they reach the end, they begin again."""
        found = self.tokens[place : place + MAX_DRAFT]
        return (found * MAX_DRAFT)[:MAX_DRAFT] if found else []


class ForcedRuns:
    """What a grammar forces next. Without log-probabilities those tokens need no step at all (see
    `SamplingState.jump_forward`); with them, one step gives those of the whole run."""

    name = FORCED

    def propose(self, sequence: Sequence) -> Proposal | None:
        run = sequence.sampling.forced_run[:MAX_DRAFT]
        return Proposal(self.name, run, LONGEST_MATCH) if run else None

    def finish(self, sequence: Sequence) -> None: ...


class Lookup:
    """What followed in the request itself, prompt or reply, when its last tokens came before."""

    name = "lookup"

    def __init__(self) -> None:
        self._indexes: WeakKeyDictionary[Sequence, NgramIndex] = WeakKeyDictionary()

    def propose(self, sequence: Sequence) -> Proposal | None:
        tokens = sequence.kv.tokens
        if (index := self._indexes.get(sequence)) is None:
            index = NgramIndex(tokens, max(0, len(tokens) - INDEXED))
            self._indexes[sequence] = index
        place, match = index.find(tokens)
        return Proposal(self.name, index.after(place), match) if match else None

    def finish(self, sequence: Sequence) -> None: ...


class Predicted:
    """What followed in the reply that the request predicts."""

    name = "prediction"

    def __init__(self) -> None:
        self._indexes: WeakKeyDictionary[Sequence, NgramIndex] = WeakKeyDictionary()

    def propose(self, sequence: Sequence) -> Proposal | None:
        prediction = sequence.request.prediction
        if not prediction:
            return None
        done = sequence.sampling.generated
        if done < START and sequence.kv.tokens[sequence.sampling.prompt :] == prediction[:done]:
            found = prediction[done : done + MAX_DRAFT]
            return Proposal(self.name, found, START) if found else None
        if (index := self._indexes.get(sequence)) is None:
            index = self._indexes[sequence] = NgramIndex(prediction[:INDEXED])
        place, match = index.find(sequence.kv.tokens)
        found = prediction[place : place + MAX_DRAFT]
        return Proposal(self.name, found, match) if match and found else None

    def finish(self, sequence: Sequence) -> None: ...


class Recent:
    """What followed in recent replies to requests of the same salt, so that nobody sees in the time
    a reply takes what others were told."""

    name = "recent"

    def __init__(self) -> None:
        self._by_salt: OrderedDict[str, NgramIndex] = OrderedDict()

    def propose(self, sequence: Sequence) -> Proposal | None:
        if (index := self._by_salt.get(sequence.kv.salt)) is None:
            return None
        place, match = index.find(sequence.kv.tokens[-LONGEST_MATCH:])
        found = index.tokens[place : place + MAX_DRAFT]
        return Proposal(self.name, found, match) if match and found else None

    def finish(self, sequence: Sequence) -> None:
        salt, reply = sequence.kv.salt, sequence.kv.tokens[sequence.sampling.prompt :]
        index = self._by_salt.get(salt)
        if index is None or len(index.tokens) + len(reply) > RECENT_TOKENS:
            kept = index.tokens[-RECENT_TOKENS // 2 :] if index is not None else []
            index = self._by_salt[salt] = NgramIndex(kept)
        index.tokens += reply[-RECENT_TOKENS // 2 :]
        self._by_salt.move_to_end(salt)
        while len(self._by_salt) > RECENT_SALTS or self.size > RECENT_TOKENS:
            self._by_salt.popitem(last=False)

    @property
    def size(self) -> int:
        """Tokens that are kept."""
        return sum(len(index.tokens) for index in self._by_salt.values())


def all_sources() -> list[DraftSource]:
    """Of two proposals that seem as good, the source that comes first has its way."""
    return [ForcedRuns(), Predicted(), Lookup(), Recent()]
