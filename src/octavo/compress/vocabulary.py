"""A folder's tokenizer.json as the vocabulary of a GGUF file.

A vocabulary that is written is read back and must split a sample of all scripts as the folder's
tokenizer does: GGUF files name a rule for splitting text, they do not hold it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from tokenizers import Tokenizer as HfTokenizer
from tokenizers.models import BPE

from octavo.checkpoint.base import Checkpoint
from octavo.errors import CheckpointError, Unsupported
from octavo.text import gguf_vocabulary, splitting
from octavo.text.chat import template_source
from octavo.text.gguf_vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from octavo.text.tokenizer import Tokenizer, load_tokenizer

_RANGES = (
    (0x20, 0x7F), (0xA0, 0x250), (0x370, 0x400), (0x400, 0x460), (0x5D0, 0x5EB), (0x620, 0x650),
    (0x904, 0x93A), (0xE01, 0xE30), (0x1100, 0x1110), (0x3041, 0x30FF), (0x4E00, 0x4E40),
    (0xAC00, 0xAC20), (0x1F600, 0x1F620), (0x2000, 0x2050), (0x1D400, 0x1D410),
)  # fmt: skip
_SPACES = ("", " ", "  ", "   ", "\n", "\n\n", "\r\n", " \n", "\t", "\n ", "        ")
_WORDS = (
    "I'll", "DON'T", "it's", "HTTPServer", "camelCase", "x1y22z333w4444", "3.14", "1,000,000",
    "e\u0301", "na\u00efve", "(a+b)*c==d;", "/usr/bin/env", "#include<stdio.h>", "...", "\u2014",
    "a\u200db", "5\u20ac", "!!!", "what?\n", "\u65e5\u672c\u8a9e\u3067\u3059", "\u4f60\u597d123",
)  # fmt: skip


@cache
def probe() -> str:
    """Text that tells splitting rules apart: words, digits, signs and spaces of many scripts."""
    scripts = ("".join(map(chr, range(*r))) for r in _RANGES)
    pairs = zip(_WORDS, _SPACES * 2, _WORDS[7:], strict=False)
    mixed = (f"{s}{w}{t}{v}" for w, t, v in pairs for s in _SPACES)
    return " ".join((*_WORDS, *scripts, *mixed, "".join(_SPACES)))


def vocabulary(checkpoint: Checkpoint, size: int) -> dict[str, Any]:
    """`tokenizer.*` keys of a GGUF file for a folder's tokenizer, padded to `size` tokens.

    Raises CheckpointError or Unsupported where llama.cpp's rules cannot say what it does.
    """
    name = checkpoint.path.name
    ours = load_tokenizer(checkpoint)
    source = ours.backend
    if not isinstance(source.model, BPE):
        raise Unsupported(
            f"{name}: GGUF's vocabularies of {type(source.model).__name__} models are not written",
            "octavo convert to another format",
        )
    model = json.loads(source.to_str())["model"]
    tokens, kinds = _tokens(source, ours, size)
    pieces = {"tokens": tokens, "token_type": kinds}
    merges = [m if isinstance(m, list) else m.split(" ", 1) for m in model["merges"]]
    found = _sentencepiece if model["byte_fallback"] else _byte_level
    pieces |= found(source, model, tokens, kinds, merges)
    special = ours.special
    ids = {"bos": special.bos, "eos": special.end, **_other_ids(checkpoint, ours)}
    pieces |= {f"{k}_token_id": v for k, v in ids.items() if v is not None}
    pieces["add_bos_token"] = special.add_bos
    out = {f"tokenizer.ggml.{k}": v for k, v in pieces.items()}
    if (template := template_source(checkpoint)) is not None:
        out["tokenizer.chat_template"] = template
    _check(name, ours, out)
    return out


def _tokens(source: HfTokenizer, ours: Tokenizer, size: int) -> tuple[list[str], list[int]]:
    """Tokens by id and their types; ids without a token get names of their own."""
    largest = max(source.get_vocab(with_added_tokens=True).values(), default=0)
    tokens = [f"[PAD{i}]" for i in range(max(size, largest + 1))]
    kinds = [UNUSED] * len(tokens)
    added = source.get_added_tokens_decoder()
    for token, i in source.get_vocab(with_added_tokens=True).items():
        tokens[i], kinds[i] = token, NORMAL
        if i in added:
            kinds[i] = CONTROL if added[i].special else USER_DEFINED
    for i in ours.special.control:
        kinds[i] = CONTROL
    return tokens[:size], kinds[:size]


def _byte_level(
    source: HfTokenizer, model: Mapping[str, Any], tokens: list[str], kinds: list[int],
    merges: list[list[str]],
) -> dict[str, Any]:  # fmt: skip
    """The first of the rules that GGUF names by which the probe falls into the same words."""
    wanted = _words(source, probe())
    names = (*splitting.GPT2, *splitting.GPT2_DIGITS, *splitting.PATTERNS, "falcon")
    for name in names:
        ignore = name in splitting.IGNORES_MERGES
        if ignore == bool(model["ignore_merges"]) and _split(name) == wanted:
            return {"model": "gpt2", "pre": name, "merges": [" ".join(pair) for pair in merges]}
    raise Unsupported(
        "this tokenizer splits text by a rule that GGUF has no name for",
        f"named: {', '.join(names)}",
    )


def _words(source: HfTokenizer, text: str) -> list[str]:
    if source.normalizer is not None:
        text = source.normalizer.normalize_str(text)
    if source.pre_tokenizer is None:
        return [text]
    return [word for word, _ in source.pre_tokenizer.pre_tokenize_str(text)]


@cache
def _split(name: str) -> list[str]:
    """The words that the probe falls into by a named rule."""
    text = probe()
    if (normalizer := splitting.normalizer(name)) is not None:
        text = normalizer.normalize_str(text)
    return [word for word, _ in splitting.pre_tokenizer(name).pre_tokenize_str(text)]


def _sentencepiece(
    source: HfTokenizer, model: Mapping[str, Any], tokens: list[str], kinds: list[int],
    merges: list[list[str]],
) -> dict[str, Any]:  # fmt: skip
    """Scores that fall with the place of the first merge that makes a token."""
    first: dict[str, int] = {}
    for place, (left, right) in enumerate(merges):
        first.setdefault(left + right, place)
    last = len(merges)
    scores = [-float(first.get(t, last)) for t in tokens]
    for i, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x") and kinds[i] == NORMAL:
            kinds[i] = BYTE
        if token == model["unk_token"]:
            kinds[i] = UNKNOWN
    unknown = tokens.index(model["unk_token"]) if model["unk_token"] in tokens else None
    prefix = "Prepend" in str(json.loads(source.to_str())["normalizer"])
    found = {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": prefix}
    return found | ({"unknown_token_id": unknown} if unknown is not None else {})


def _other_ids(checkpoint: Checkpoint, ours: Tokenizer) -> dict[str, int | None]:
    """The padding token, and a second one that ends a turn."""
    padding = checkpoint.metadata.get("pad_token_id")
    turns = sorted(ours.special.eos - {ours.special.end})
    return {
        "padding": padding if isinstance(padding, int) and padding >= 0 else None,
        "eot": turns[0] if turns else None,
    }


def _check(name: str, ours: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Raises Unsupported if what was written encodes the probe otherwise."""
    theirs, _ = gguf_vocabulary.build(metadata)
    theirs.encode_special_tokens = True
    text = probe()
    if theirs.encode(text, add_special_tokens=False).ids != ours.encode(text, add_bos=False):
        raise Unsupported(
            f"{name}: no vocabulary of a GGUF file encodes text as its tokenizer.json does",
            "octavo convert to another format",
        )
    if ours.special.bos is not None and not 0 <= ours.special.bos < len(
        metadata["tokenizer.ggml.tokens"]
    ):
        raise CheckpointError(f"{name}: the tokenizer's bos token is beyond the model's vocabulary")
