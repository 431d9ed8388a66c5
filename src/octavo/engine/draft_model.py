"""A draft model: a smaller one that writes what the target may write next, a few tokens ahead.

It has an executable and a KV cache of its own, with the same prefix index, so that prompts which
begin alike are computed once here too. Sequences that want drafts are computed together. It draws
with the random number that the target will draw with at the same position: where both give the same
probabilities, both draw the same token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from octavo.backends.base import BLOCK, Executable, Sample, SamplingRow
from octavo.engine.blocks import BlockAllocator
from octavo.engine.drafts import Proposal, written
from octavo.engine.kv import KVCache, KVState
from octavo.engine.limits import MAX_DRAFT
from octavo.engine.prefix import PrefixIndex
from octavo.engine.runner import DraftSpan, draft_input
from octavo.engine.sequence import Sequence
from octavo.engine.translation import CONTEXT, Translation


class Languages(NamedTuple):
    """Between models of different vocabularies. first: what the draft model's texts begin with."""

    to_draft: Translation
    to_target: Translation
    first: list[int]


@dataclass(eq=False, slots=True)
class _Held:
    """What is held of a sequence.

    kv: its text in the draft model's tokens. seen: tokens of the sequence that this has. ahead:
    tokens written after it, of which all but the last have keys and values; samples: how.
    rest: bytes of a character that is not complete.
    """

    kv: KVState
    seen: int = 0
    ahead: list[int] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    rest: bytes = b""


class DraftModel:
    """Drafts for the sequences of a target.

    vocabulary: of the target. context: of the draft model, beyond which it writes nothing.
    languages: None where both have the same tokens.
    """

    name = "draft"

    def __init__(
        self, executable: Executable, vocabulary: int, context: int,
        languages: Languages | None = None,
    ) -> None:  # fmt: skip
        self._executable = executable
        self._vocabulary = vocabulary
        self._context = min(context, executable.limits.blocks * BLOCK)
        self._languages = languages
        self._allocator = BlockAllocator(executable.limits.blocks)
        self._kv = KVCache(PrefixIndex(self._allocator), executable.copy_block)
        self._held: WeakKeyDictionary[Sequence, _Held] = WeakKeyDictionary()

    @property
    def blocks_held(self) -> int:
        """Blocks that sequences hold."""
        return self._kv.capacity - self._kv.available

    def serves(self, sequence: Sequence) -> bool:
        """True if it can write what follows: it sees no images."""
        return not sequence.images and len(sequence.kv.tokens) + MAX_DRAFT <= self._context

    def lag(self, sequence: Sequence) -> int:
        """Tokens to compute before it is where it would be had it always kept up."""
        held, length = self._held.get(sequence), len(sequence.kv.tokens)
        if held is None:
            return length - 1
        return max(0, length - held.seen + held.kv.pending - len(held.ahead) - 1)

    def free(self, sequence: Sequence) -> None:
        """Lets a sequence go; what was computed stays in the prefix cache."""
        if (held := self._held.pop(sequence, None)) is not None:
            self._kv.finish(held.kv)

    def prepare(self, idle: bool) -> bool:
        """Does work left over from loading. Returns True if more remains."""
        executable = self._executable
        return executable.pack_pending() or executable.prefault_kv(self._allocator.reached, idle)

    # -- drafts ---------------------------------------------------------------------------------

    def propose(self, sequences: list[Sequence], depth: int) -> list[Proposal | None]:
        """What follows each, `depth` tokens of the draft model long; None where it has to catch up
        first, or has no room."""
        parts: list[tuple[_Held, DraftSpan]] = []
        left = self._executable.limits.tokens
        pairs = [(s, h) for s in sequences if (h := self._follow(s, depth)) is not None]
        for sequence, held in sorted(pairs, key=lambda pair: pair[1].kv.pending):
            start, length = held.kv.computed, len(held.kv.tokens)
            end = min(length, start + left)
            left -= end - start
            if end > start:
                row = self._row(sequence) if end == length else None
                span = DraftSpan(held.kv.blocks, start, held.kv.tokens[start:end], row)
                parts.append((held, span))
        if parts:
            self._write(parts, depth)
        return [self._proposal(s) for s in sequences]

    def _follow(self, sequence: Sequence, depth: int) -> _Held | None:
        """Takes in what the sequence has become, and blocks for `depth` tokens more. Of the tokens
        that were written ahead, those that were drawn keep their keys and values."""
        if (held := self._held.get(sequence)) is None:
            first = [] if self._languages is None else self._languages.first
            held = _Held(KVState(list(first), sequence.kv.salt))
            self._take(held, sequence.kv.tokens)
            if not held.kv.tokens or not self._kv.admit(held.kv, 0, True):
                return None
            self._held[sequence] = held
        elif kept := self._take(held, sequence.kv.tokens[held.seen :]):
            self._kv.advance(held.kv, kept)
        if not held.kv.pending:  # nothing new: the last token is computed again, to draw after it
            held.kv.computed -= 1
        length = len(held.kv.tokens) + depth
        if held.rest or length > self._context:  # its tokens may be more than the target's
            return None
        return held if self._kv.extend(held.kv, length) else None

    def _take(self, held: _Held, new: list[int]) -> int:
        """Appends tokens of the target; how many of those written ahead keep their keys and
        values."""
        ahead, held.ahead = held.ahead, []
        held.seen += len(new)
        kept = 0
        if self._languages is None:
            while kept < min(len(ahead), len(new)) and ahead[kept] == new[kept]:
                kept += 1
            held.kv.tokens += new
        else:
            speak, hear = self._languages.to_draft, self._languages.to_target
            first, *more = speak.pieces(new)
            assert isinstance(first, bytes)
            text = held.rest + first
            while (
                kept < len(ahead) and (said := hear.text([ahead[kept]])) and text.startswith(said)
            ):
                text = text[len(said) :]
                kept += 1
            held.kv.tokens += ahead[:kept]
            written, held.rest = speak.write([text, *more], hear.text(held.kv.tokens[-CONTEXT:]))
            held.kv.tokens += written
        return max(0, min(kept, len(ahead) - 1))

    def _row(self, sequence: Sequence) -> SamplingRow:
        """How to draw ahead; the likeliest token where positions are not the target's."""
        row = sequence.sampling.draft_row()
        return row if self._languages is None else SamplingRow(logprobs=2)

    def _write(self, parts: list[tuple[_Held, DraftSpan]], depth: int) -> None:
        """Computes spans, and then writes on where they reach the ends of their texts."""
        fresh = parts
        if any(len(span.ids) > 1 or span.row is None for _, span in parts):
            fresh = []
            samples = iter(self._executable.step(draft_input([span for _, span in parts])))
            going = []
            for held, span in parts:
                self._kv.advance(held.kv, len(span.ids))
                if span.row is not None and self._add(held, sample := next(samples)):
                    row = span.row._replace(position=span.row.position + 1)
                    start = span.start + len(span.ids)
                    going.append((held, DraftSpan(held.kv.blocks, start, [sample.token], row)))
            parts, depth = going, depth - 1
        if not parts or not depth:
            return
        step = draft_input([span for _, span in parts])
        rounds = self._executable.decode(step, depth, [[]] * len(parts))
        for held, _ in fresh:
            self._kv.advance(held.kv, 1)
        for (held, _), drawn in zip(parts, zip(*rounds, strict=True), strict=True):
            for sample in drawn:
                if not self._add(held, sample):
                    break

    def _add(self, held: _Held, sample: Sample) -> bool:
        """Takes a token that was written ahead. False for none that the target could draw."""
        if sample.token < 0 or (self._languages is None and sample.token >= self._vocabulary):
            return False
        if not held.ahead:
            held.samples = []
        held.ahead.append(sample.token)
        held.samples.append(sample)
        return True

    def _proposal(self, sequence: Sequence) -> Proposal | None:
        held = self._held.get(sequence)
        if held is None or not held.ahead:
            return None
        if self._languages is None:
            return written(self.name, held.samples)
        speak, hear = self._languages.to_draft, self._languages.to_target
        before = speak.text(sequence.kv.tokens[-CONTEXT:])
        tokens, _ = hear.write(hear.pieces(held.ahead), before)
        if not tokens:
            return None
        likely = written(self.name, held.samples).likely
        share = len(likely) / len(tokens)
        likely = [likely[int(i * share)] for i in range(len(tokens))]
        return Proposal(self.name, tokens[:MAX_DRAFT], 0, likely[:MAX_DRAFT])
