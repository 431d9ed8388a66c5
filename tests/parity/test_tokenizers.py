"""Our tokenizers against Hugging Face's for the same files, on 12,000 strings of every script."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from octavo.checkpoint import open_checkpoint
from octavo.text import Detokenizer, load_tokenizer
from tests.conftest import real_text

COUNT = 12_000
SCRIPTS = [
    (0x20, 0x7F), (0xA0, 0x250), (0x370, 0x52F), (0x590, 0x6FF), (0x900, 0xD7F), (0xE00, 0xE7F),
    (0x1100, 0x11FF), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1F300, 0x1FAFF),
    (0x2000, 0x206F), (0, 0x20), (0x1D400, 0x1D7FF), (0xFE00, 0xFE0F),
]  # fmt: skip
SPACES = [" ", "\n", "\t", "\r", "  ", "a", "1", "\u3000", "\xa0"]
TRICKY = [
    "👨‍👩‍👧", "🇩🇪", "é", "e\u0301", "<|im_end|>", "<b>", "</table>", "1", "22", "333", "'ll", " don", "'t",
    "\u200d", ".", "...", "—",
]  # fmt: skip


def strings(count: int) -> Iterator[str]:
    """Prose, single scripts, mixed scripts, whitespace and control runs, joined words, oddities."""
    r = random.Random(1)
    words = real_text(400_000).split(" ")

    def any_of(low: int, high: int) -> str:
        return chr(r.randrange(low, high))

    for i in range(count):
        n = r.randrange(1, 40)
        script = r.choice(SCRIPTS)
        yield [
            lambda n=n: " ".join(r.choices(words, k=n)),
            lambda n=n, s=script: "".join(any_of(*s) for _ in range(n)),
            lambda n=n: "".join(any_of(*r.choice(SCRIPTS)) for _ in range(n)),
            lambda n=n: "".join(
                r.choice(SPACES) * r.choice([1, 1, 2, 5, 17, 40]) for _ in range(n)
            ),
            lambda n=n: "".join(
                r.choice(words) + r.choice([" ", "", "'s ", "\n\n", " 12345 "])
                for _ in range(n // 4 + 1)
            ),
            lambda n=n: "".join(r.choices(TRICKY, k=n // 2 + 1)),
        ][i % 6]()


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_ids_and_streams(model: str, request: pytest.FixtureRequest) -> None:
    from transformers import AutoTokenizer

    path: Path = request.getfixturevalue(model)
    oracle = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer
    oracle.encode_special_tokens = True
    if model == "smollm2":
        # SmolLM2's published tokenizer splits digits; the conversion from GGUF forgets that step.
        digits = pre_tokenizers.Digits(individual_digits=True)
        oracle.pre_tokenizer = pre_tokenizers.Sequence([digits, oracle.pre_tokenizer])
    ours = load_tokenizer(open_checkpoint(path))
    different = compared = 0
    for text in strings(COUNT):
        if model == "gemma3" and " " * 32 in text:
            continue  # the conversion loses Gemma's tokens of many spaces; the published file has them
        ids = ours.encode(text, add_bos=False)
        compared += 1
        different += ids != oracle.encode(text, add_special_tokens=False).ids
        d = Detokenizer(ours.bytes)
        assert "".join(map(d.push, ids)) == ours.decode(ids)
    assert compared >= 10_000
    assert different == 0
