"""Text to calibrate with and to measure on: two parts that share nothing, from any sound source."""

from __future__ import annotations

import json
from pathlib import Path
from time import process_time

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from octavo.checkpoint import open_checkpoint
from octavo.compress import written
from octavo.compress.data import _cut, split, token_blocks
from octavo.errors import UsageError
from octavo.text import Tokenizer, load_tokenizer
from tests.small_models import Small, save_gguf


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(smollm2))


def paragraphs(count: int) -> list[str]:
    return [f"Paragraph {i} tells of {i * i} things, and of {i + 1} more." for i in range(count)]


def both(data: Path | None) -> tuple[set[str], set[str]]:
    """The parts of some data, which share nothing."""
    calibration, evaluation = (split(part, data) for part in ("calibration", "evaluation"))
    assert calibration and evaluation
    assert not set(calibration) & set(evaluation)
    assert split("evaluation", data) == evaluation
    return set(calibration), set(evaluation)


def test_the_manual() -> None:
    """About half of it each, by topic."""
    calibration, evaluation = both(None)
    sizes = [sum(map(len, part)) for part in (calibration, evaluation)]
    assert min(sizes) > 0.4 * sum(sizes)


def test_a_folder_of_texts_and_lines(tmp_path: Path) -> None:
    texts = paragraphs(40)
    (tmp_path / "in").mkdir()
    for i, text in enumerate(texts[:20]):
        (tmp_path / "in" / f"{i}.txt").write_text(text)
    lines = [json.dumps({"text": t}) for t in texts[20:30]]
    lines += [
        json.dumps({"messages": [{"role": "user", "content": t}, {"role": "tool"}]})
        for t in texts[30:]
    ]
    (tmp_path / "lines.jsonl").write_text("\n".join([*lines, "", lines[0]]) + "\n")
    (tmp_path / "weights.bin").write_bytes(b"\xff\xfe")
    calibration, evaluation = both(tmp_path)
    assert calibration | evaluation == set(texts)


def test_later_documents_move_no_others(tmp_path: Path) -> None:
    """What was calibrated with yesterday is not measured on today."""
    file = tmp_path / "a.jsonl"
    texts = paragraphs(60)
    file.write_text("\n".join(json.dumps({"text": t}) for t in texts[:30]))
    before = both(file)
    file.write_text("\n".join(json.dumps({"text": t}) for t in reversed(texts)))
    after = both(file)
    assert before[0] <= after[0] and before[1] <= after[1]


def test_one_long_text_is_cut_at_its_paragraphs(tmp_path: Path) -> None:
    text = "\n\n".join(paragraphs(2000))
    (tmp_path / "a.txt").write_text(text)
    calibration, evaluation = both(tmp_path / "a.txt")
    pieces = calibration | evaluation
    assert sum(map(len, pieces)) == len(text)
    assert all(len(p) <= 16_384 and p.strip().endswith("more.") for p in pieces)


def test_messages_in_parts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "this?"}]
    lines = [{"messages": [{"role": "user", "content": parts}]}]
    lines += [{"messages": [{"role": "user", "content": f"And {t}"}]} for t in paragraphs(9)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert "What is\n\nthis?" in set.union(*both(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "a.txt holds no text"),
        ("a.txt", b" \n\n ", "a.txt holds no text"),
        ("a.txt", b"one", "a.txt: 3 characters are too few"),
        ("a.txt", b"caf\xe9 noir" * 500, "a.txt: byte 3 is not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', 'a.jsonl, line 2: neither "text"'),
        ("a.jsonl", b'{"text": "a"}\n\n[1]\n', 'a.jsonl, line 3: neither "text"'),
        ("a.jsonl", b'{"text": 5}\n', 'a.jsonl, line 1: neither "text"'),
        ("a.jsonl", b"{'text'}\n", "a.jsonl, line 1: not valid JSON"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl, line 1: not valid JSON"),
        ("a.jsonl", b'{"messages": [{"content": 5}]}', 'line 1: a message whose "content"'),
        ("a.jsonl", b'{"messages": ["hello"]}', 'line 1: a message whose "content"'),
        ("a.jsonl", rb'{"text": "\ud800"}', "line 1: half a character"),
    ],
)  # fmt: skip
def test_bad_data(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError) as e:
        split("evaluation", tmp_path / name)
    assert message in str(e.value)


def test_no_data(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no file or folder"):
        split("evaluation", tmp_path / "none.txt")
    with pytest.raises(UsageError, match=r"holds no \.txt"):
        split("evaluation", tmp_path)


def test_blocks(tokenizer: Tokenizer) -> None:
    texts = split("evaluation")
    blocks = token_blocks(texts, tokenizer, 64, 100)
    assert blocks.shape == (100, 64) and blocks.dtype == np.int32
    ids = [i for text in texts for i in tokenizer.encode(text, add_bos=False)]
    assert blocks.reshape(-1).tolist() == ids[:6400]
    assert np.array_equal(token_blocks(texts, tokenizer, 64, 10), blocks[:10])
    few = token_blocks(texts[:1], tokenizer, 64, 1000)
    assert few.shape[0] == len(tokenizer.encode(texts[0], add_bos=False)) // 64


def test_blocks_begin_as_prompts_do(gemma3: Path) -> None:
    tokenizer = load_tokenizer(open_checkpoint(gemma3))
    blocks = token_blocks(split("evaluation"), tokenizer, 64, 10)
    assert blocks.shape == (10, 64)
    assert (blocks[:, 0] == tokenizer.special.bos).all()
    assert (blocks[:, 1:] != tokenizer.special.bos).all()


def test_what_a_model_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same texts every time, dealt like any others."""
    monkeypatch.setattr(written, "COUNT", 12)
    monkeypatch.setattr(written, "TOKENS", 8)
    model = tmp_path / "m.gguf"
    save_gguf(Small(), model, GGMLQuantizationType.F32)
    texts = written.written(model)
    assert len(set(texts)) == 12
    parts = [split(part, Path("self"), model) for part in ("calibration", "evaluation")]
    assert not set(parts[0]) & set(parts[1])
    assert set(parts[0]) | set(parts[1]) == set(texts)
    assert split("evaluation", Path("self"), model) == parts[1]


def test_too_few_tokens(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="the text has 1 tokens; a block of 64 takes 64"):
        token_blocks(["one"], tokenizer, 64, 10)


def test_a_long_line_is_cut_in_time() -> None:
    """Each character is looked at a few times, not once for each piece."""
    text = "x" * (16 << 20)
    begun = process_time()
    assert sum(map(len, _cut(text, 256))) == len(text)
    assert process_time() - begun < 5
