"""What a grammar forces: the tokens the tokenizer would write, found from the tokens so far alone."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.checkpoint import open_checkpoint
from octavo.engine.bitmask import mask_of, tokens_of
from octavo.engine.constraint import Constraint, GrammarCompiler
from octavo.generate.served import token_table
from octavo.text import Tokenizer, load_tokenizer
from octavo.text.grammar import HEADER, from_choice, from_grammar, from_schema

PLAN = {
    "type": "object",
    "properties": {
        "punchline": {"type": "string", "maxLength": 9}, "quantity_unit": {"enum": ["celsius", "fahrenheit", "cm"]},
        "n": {"type": "integer"}, "ocean": {"type": "boolean"}, "opt": {"const": "naïve ☃ 漢字"},
    },
    "required": ["punchline", "quantity_unit", "n"],
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(smollm2))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(token_table(tokenizer), len(tokenizer.bytes))


def begin(compiler: GrammarCompiler, grammar: str) -> Constraint:
    return compiler.constraint(compiler.start(grammar))


def write(constraint: Constraint, rng: random.Random, most: int = 200) -> list[int]:
    """Tokens drawn from what is left of the mask, to the end."""
    out: list[int] = []
    while not constraint.finished and len(out) < most:
        legal = tokens_of(constraint.narrow(constraint.mask()))
        out.append(rng.choice(legal))
        constraint.push(out[-1])
    return out


@pytest.mark.parametrize(
    "text",
    ["Paris", '{"punchline": "x"}', "The end. " * 300, "naïve ☃ 漢字 \U0001f600 z", "a\nb  c\t", " leading", "1234567"],
)  # fmt: skip
def test_one_text_is_one_run(compiler: GrammarCompiler, tokenizer: Tokenizer, text: str) -> None:
    """Without a choice there is one way to write it: the tokenizer's."""
    constraint = begin(compiler, from_choice([text]))
    made = []
    while not constraint.finished:
        (token,) = tokens_of(constraint.narrow(constraint.mask()))
        constraint.push(token)
        made.append(token)
    assert b"".join(tokenizer.bytes[t] for t in made).decode() == text
    assert made == tokenizer.encode(text, add_bos=False)


def test_keys_are_whole(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """However values are written, keys and choices are in the tokenizer's tokens."""
    rng = random.Random(3)
    for _ in range(40):
        made = write(begin(compiler, from_schema(PLAN)), rng)
        text = b"".join(tokenizer.bytes[t] for t in made)
        pieces = [tokenizer.bytes[t] for t in made]
        for key in (b"punchline", b"quantity_unit", b"fahrenheit"):
            at = text.find(b'"' + key + b'"')
            if at >= 0:
                assert _cut(pieces, at + 1, at + 1 + len(key)) == _as_written(tokenizer, key)


def _cut(pieces: list[bytes], start: int, end: int) -> list[bytes]:
    """The pieces within a span of their text."""
    out, at = [], 0
    for piece in pieces:
        if start <= at and at + len(piece) <= end:
            out.append(piece)
        at += len(piece)
    return out


def _as_written(tokenizer: Tokenizer, key: bytes) -> list[bytes]:
    whole = [tokenizer.bytes[t] for t in tokenizer.encode(f'"{key.decode()}"', add_bos=False)]
    return _cut(whole, 1, 1 + len(key))


def test_the_next_tokens_follow_from_those_before(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """Told the tokens up to anywhere (after a crash, in a beam), it goes on as it would have."""
    rng = random.Random(5)
    for _ in range(10):
        made = write(begin(compiler, from_schema(PLAN)), rng, 60)
        whole, masks = begin(compiler, from_schema(PLAN)), []
        for token in made:
            masks.append(whole.narrow(whole.mask()))
            whole.push(token)
        for cut in range(0, len(made), 7):
            again = begin(compiler, from_schema(PLAN))
            for token in made[:cut]:
                again.push(token)
            for other in (again, again.fork()):
                for token, mask in zip(made[cut:], masks[cut:], strict=True):
                    assert (other.narrow(other.mask()) == mask).all()
                    other.push(token)


def test_narrow_only_takes_away(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Never a token that is not legal, and never the last of those that are left."""
    rng = random.Random(7)
    for _ in range(20):
        constraint = begin(compiler, from_schema(PLAN))
        for _ in range(60):
            if constraint.finished:
                break
            mask = constraint.mask()
            some = mask & np.array([rng.getrandbits(32) for _ in mask], np.uint32)
            for legal in (mask, some):
                narrowed = constraint.narrow(legal)
                assert not (narrowed & ~legal).any()
                assert narrowed.any() == legal.any()
            constraint.push(rng.choice(tokens_of(constraint.narrow(mask))))


def test_a_longer_token_may_reach_past_what_is_forced(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """What follows a forced text may join its last token: that is for the model to say."""
    constraint = begin(compiler, from_grammar('start: "the" /[a-z]+/'))
    words = {tokenizer.bytes[t] for t in tokens_of(constraint.narrow(constraint.mask()))}
    assert b"the" in words and b"there" in words and b"th" not in words


def test_control_tokens_bound_a_run(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    end = tokenizer.vocabulary["<|im_start|>"]
    constraint = begin(compiler, HEADER + f'start: "quantity" <[{end}]> "unit"')
    rng = random.Random(1)
    assert write(constraint, rng) == [
        *tokenizer.encode("quantity", add_bos=False), end, *tokenizer.encode("unit", add_bos=False),
    ]  # fmt: skip


def test_masks_and_tokens() -> None:
    for tokens in ([], [0], [31, 32, 95], list(range(96))):
        assert tokens_of(mask_of(tokens, 3)) == tokens


def test_every_text_can_still_be_written(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """For each value there is a way through the narrowed masks."""
    values: list[dict[str, Any]] = [
        {"punchline": p, "quantity_unit": u, "n": n} | more
        for p in ("", "a b", "\u00e9\u00e9", '"', "}") for u in ("celsius", "cm") for n in (0, -1234)
        for more in ({}, {"ocean": True}, {"opt": "na\u00efve \u2603 \u6f22\u5b57"})
    ]  # fmt: skip
    for value in values:
        text = json.dumps(value, ensure_ascii=False).encode()
        assert _written(begin(compiler, from_schema(PLAN)), tokenizer, text), text


def _written(constraint: Constraint, tokenizer: Tokenizer, text: bytes) -> bool:
    """Whether some tokens spell `text`: depth first, longest first."""
    if not text:
        return constraint.finished or constraint.complete
    if constraint.finished:
        return False
    mask = constraint.narrow(constraint.mask())
    fitting = [
        t for t in tokens_of(mask) if (b := tokenizer.bytes[t]) and text.startswith(b)
    ]  # fmt: skip
    for token in sorted(fitting, key=lambda t: -len(tokenizer.bytes[t])):
        after = constraint.fork()
        after.push(token)
        if _written(after, tokenizer, text[len(tokenizer.bytes[token]) :]):
            return True
    return False
