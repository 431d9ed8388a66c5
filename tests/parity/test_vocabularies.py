"""Vocabularies of GGUF files by rule: published splitting rules, Gemma 4's merges, WordPiece."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from octavo.errors import Unsupported
from tests.conftest import npm_tokenizer
from tests.parity.test_tokenizers import (
    BYTE,
    CONTROL,
    NORMAL,
    UNUSED,
    check,
    converted,
    from_gguf,
    strings,
)

COUNT = 3_000

# -- rules whose vocabularies no package carries ----------------------------------------------

CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)


def split(*patterns: str) -> list[dict[str, Any]]:
    return [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        for p in patterns
    ]


def byte_level(regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": regex,
    }


CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
SINGLE, GROUPS = ({"type": "Digits", "individual_digits": each} for each in (True, False))
# The pre_tokenizer of the tokenizer.json of falcon-7b, deepseek-llm-7b, deepseek-coder-6.7b, bloom.
PUBLISHED: dict[str, list[dict[str, Any]]] = {
    "falcon": [
        {"type": "Punctuation", "behavior": "Contiguous"}, byte_level(True), GROUPS,
        *split("[0-9][0-9][0-9]"),
    ],
    "deepseek-llm": [
        *split("[\r\n]", f"\\s?[{CASED}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
               "\\s+$", CJK), SINGLE, byte_level(False),
    ],
    "deepseek-coder": [
        *split("[\r\n]", "\\s?\\p{L}+", "\\s?\\p{P}+", CJK), SINGLE, byte_level(False)
    ],
    "bloom": [*split(" ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"), byte_level(False)],
}  # fmt: skip


@pytest.mark.parametrize("pre", PUBLISHED)
def test_published_rules(pre: str, tmp_path: Path) -> None:
    """Another model's merges behind the splitting rule as it is published."""
    source = json.loads((npm_tokenizer("qwen3") / "tokenizer.json").read_text())
    rule = {"type": "Sequence", "pretokenizers": PUBLISHED[pre]}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(source | {"pre_tokenizer": rule, "normalizer": None})
    )
    metadata, oracle = converted(tmp_path)
    ours = from_gguf(metadata | {"model": "gpt2", "pre": pre, "eos_token_id": 0})
    check(ours, lambda text: oracle.encode(text, add_special_tokens=False).ids, COUNT)


def test_qwen35() -> None:
    """Against transformers' class for it, which differs from Qwen 3's where marks combine."""
    from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

    metadata, qwen3 = converted(npm_tokenizer("qwen3"))
    plain = [i for i, kind in enumerate(metadata["token_type"]) if kind == NORMAL]
    vocabulary = {metadata["tokens"][i]: i for i in plain}
    merges = [tuple(m.split(" ")) for m in metadata["merges"]]
    oracle = Qwen3_5Tokenizer(vocab=vocabulary, merges=merges).backend_tokenizer
    types = [kind if kind == NORMAL else UNUSED for kind in metadata["token_type"]]
    ours = from_gguf(
        metadata | {"model": "gpt2", "pre": "qwen35", "token_type": types, "eos_token_id": 0}
    )
    check(ours, lambda text: oracle.encode(text, add_special_tokens=False).ids, COUNT)
    combining = "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22\u0e17\u0e35\u0e48\u0e19\u0e35\u0e48"
    assert ours.encode(combining) != qwen3.encode(combining, add_special_tokens=False).ids


def test_gemma4() -> None:
    """SentencePiece's merges as a list: Gemma 3's own, in the form of Gemma 4's files."""
    folder = npm_tokenizer("gemma3")
    metadata, oracle = converted(folder)
    types = [
        BYTE if t.startswith("<0x") and len(t) == 6 else kind
        for t, kind in zip(metadata["tokens"], metadata["token_type"], strict=True)
    ]
    ours = from_gguf(
        metadata
        | {
            "model": "gemma4",
            "token_type": types,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "unknown_token_id": 3,
        }
    )
    check(ours, lambda text: oracle.encode(text, add_special_tokens=False).ids, COUNT)
    assert ours.encode("a")[0] == 2


def test_default_rule() -> None:
    """llama.cpp's rule for files that name none, written as its four expressions one after another."""
    metadata, _ = converted(npm_tokenizer("qwen3"))
    ours = from_gguf(metadata | {"model": "gpt2", "pre": "default", "eos_token_id": 0})
    unnamed = from_gguf(metadata | {"model": "gpt2", "eos_token_id": 0})
    qwen = from_gguf(metadata | {"model": "gpt2", "pre": "qwen2", "eos_token_id": 0})
    import regex

    rules = [
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+", r"[0-9][0-9][0-9]",
    ]  # fmt: skip

    def oracle(text: str) -> list[int]:
        pieces = [text]
        for rule in rules:
            cut = []
            for piece in pieces:
                at = 0
                for match in regex.finditer(rule, piece):
                    cut += [piece[at : match.start()], match.group()]
                    at = match.end()
                cut.append(piece[at:])
            pieces = [piece for piece in cut if piece]
        return [i for piece in pieces for i in merged(piece)]

    def merged(piece: str) -> list[int]:
        return qwen_bpe.encode(piece, add_special_tokens=False).ids

    _, qwen_bpe = converted(npm_tokenizer("qwen3"))
    qwen_bpe.normalizer = None
    qwen_bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    check(ours, oracle, COUNT)
    text = "Total: $12345.67 (net)"
    assert ours.encode(text) == unnamed.encode(text) != qwen.encode(text)


# -- WordPiece --------------------------------------------------------------------------------


def wordpiece(folder: Path) -> tuple[dict[str, Any], Tokenizer]:
    """BERT's vocabulary as llama.cpp's converter writes it: words begin with a mark."""
    source = json.loads((folder / "tokenizer.json").read_text())
    special = {t["content"] for t in source["added_tokens"]}
    tokens = sorted(source["model"]["vocab"], key=source["model"]["vocab"].get)

    def phantom(token: str) -> str:
        return token if token in special else token[2:] if token[:2] == "##" else "\u2581" + token

    oracle = Tokenizer.from_file(str(folder / "tokenizer.json"))
    oracle.encode_special_tokens = True
    oracle.no_truncation()
    oracle.no_padding()
    kinds = [CONTROL if t in special else NORMAL for t in tokens]
    return {
        "model": "bert", "tokens": [phantom(t) for t in tokens], "token_type": kinds,
        "bos_token_id": 101, "seperator_token_id": 102, "unknown_token_id": 100,
    }, oracle  # fmt: skip


def test_wordpiece(minilm: Path) -> None:
    metadata, oracle = wordpiece(minilm)
    ours = from_gguf(metadata)
    for text in strings(COUNT):
        assert ours.encode(text) == oracle.encode(text, add_special_tokens=False).ids
    for first, second in (("Caf\u00e9 [SEP] \u65e5\u672c", None), ("a b", "c d"), ("", "x")):
        encoding = oracle.encode(first, second)
        assert ours.encode_segments(first, second) == (encoding.ids, encoding.type_ids)


@pytest.mark.parametrize("case", [(True, False), (False, False), (False, True)])
def test_wordpiece_with_case_and_accents(case: tuple[bool, bool], minilm: Path) -> None:
    lower, accents = case
    metadata, oracle = wordpiece(minilm)
    oracle.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=accents)
    ours = from_gguf(
        metadata | {"normalizer.lowercase": lower, "normalizer.strip_accents": accents}
    )
    for text in ("Na\u00efve CAF\u00c9 e\u0301", "\u0130stanbul STRASSE", "ABC abc \u4e2d\u6587"):
        assert ours.encode(text) == oracle.encode(text, add_special_tokens=False).ids


def test_unknown_vocabularies_are_refused() -> None:
    metadata = {"tokens": ["a", "b"], "merges": []}
    with pytest.raises(Unsupported, match=r"'wordy'.*tokenizer.ggml.pre"):
        from_gguf(metadata | {"model": "gpt2", "pre": "wordy"})
    for model in ("t5", "rwkv", "plamo2", "none"):
        with pytest.raises(Unsupported, match=f"'{model}'.*gpt2, llama, gemma4, bert are read"):
            from_gguf(metadata | {"model": model})


@pytest.mark.parametrize(("pre", "adds"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)])
def test_beginning_of_text_where_the_file_does_not_say(pre: str, adds: bool) -> None:
    metadata = {
        "model": "gpt2",
        "tokens": ["a", "b", "<s>"],
        "merges": [],
        "bos_token_id": 2,
        "pre": pre,
    }
    assert from_gguf(metadata).encode("ab") == ([2, 0, 1] if adds else [0, 1])
    assert from_gguf(metadata | {"add_bos_token": not adds}).encode("a") == (
        [0] if adds else [2, 0]
    )
