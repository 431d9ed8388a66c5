"""A `tokenizers.Tokenizer` from GGUF metadata: byte-level BPE, or SentencePiece's with fallback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer
from tokenizers.models import BPE

from octavo.errors import CheckpointError, Unsupported

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# The published splitting rules of these vocabularies.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(suffix: str, digits: str) -> str:
    """Words split where lower case turns to upper."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{_UPPER}*{_LOWER}+{suffix}|{start}{_UPPER}+{_LOWER}*{suffix}"
    return f"{words}|{digits}{_REST}"


GPT4O = _cased(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}")
TEKKEN = _cased("", r"\p{N}")
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
IGNORES_MERGES = ("llama-bpe", "llama3", "llama-v3", "tekken", "gpt-4o")  # of whole words it knows
# By GGUF's tokenizer.ggml.pre: the patterns that split text one after another.
PATTERNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), (LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan"), (QWEN2,)),
    "gpt-4o": (GPT4O,),
    "tekken": (TEKKEN,),
    "deepseek-v3": DEEPSEEK3,
}
GPT2 = ("gpt-2", "gpt2", "phi-2", "olmo", "mpt", "exaone", "jina-v2-code", "roberta-bpe")
GPT2_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "granite-docling")


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name not in PATTERNS)
    if name in GPT2:
        return byte_level
    if name in GPT2_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name in PATTERNS:
        splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in PATTERNS[name]]
        return pre_tokenizers.Sequence([*splits, byte_level])
    known = ", ".join(sorted({*GPT2, *GPT2_DIGITS, *PATTERNS}))
    raise Unsupported(
        f"the file's pre-tokenizer is {name[:40]!r}   (tokenizer.ggml.pre)",
        f"supported: {known}",
        "convert the model again with a recent converter",
    )


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> HfTokenizer:
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not all(isinstance(m, str) for m in merges):
        raise CheckpointError("the vocabulary has no merges")
    pairs = [tuple(m.split(" ", 1)) for m in merges]
    name = metadata.get("tokenizer.ggml.pre", "default")
    tokenizer = HfTokenizer(
        BPE(
            {t: i for i, t in enumerate(tokens)},
            [(p[0], p[1]) for p in pairs if len(p) == 2],
            ignore_merges=name in IGNORES_MERGES,
        )
    )
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(str(name))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def merges_from_scores(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece's merge order: every split of a piece into two pieces, best score first.

    Pieces that only the vocabulary's maker defined share a score; there the longer parts go first,
    as in the conversion that Hugging Face ships in tokenizer.json files.
    """
    index = {t: i for i, t in enumerate(tokens)}
    ranked: list[tuple[float, int, int, int, int, int, str, str]] = []
    for i, token in enumerate(tokens):
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            a = index.get(left)
            if a is not None and (b := index.get(right)) is not None:
                ranked.append((-scores[i], -at, at - len(token), i, a, b, left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> HfTokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError("the vocabulary has no scores")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    unknown_token = (
        tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None
    )
    tokenizer = HfTokenizer(
        BPE(
            {t: i for i, t in enumerate(tokens)},
            merges_from_scores(tokens, scores),
            unk_token=unknown_token,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    replace = normalizers.Replace(" ", "\u2581")
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace])
    else:
        tokenizer.normalizer = replace
    return tokenizer


def build(metadata: Mapping[str, Any]) -> tuple[HfTokenizer, list[int]]:
    """The tokenizer and the ids of its control tokens. Raises CheckpointError or Unsupported."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise CheckpointError("the file has no vocabulary (tokenizer.ggml.tokens)")
    if len(set(tokens)) != len(tokens):
        raise CheckpointError("the vocabulary names a token twice")
    kinds = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise CheckpointError("the vocabulary's token types do not match its tokens")
    model = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if model not in builders:
        raise Unsupported(
            f"tokenizer model {str(model)[:40]!r}; gpt2 (BPE) and llama (SPM) are read"
        )
    tokenizer = builders[model](metadata, tokens)
    tokenizer.add_tokens(
        [
            AddedToken(t, normalized=False, special=False)
            for t, kind in zip(tokens, kinds, strict=True)
            if kind == USER_DEFINED
        ]
    )
    return tokenizer, [i for i, kind in enumerate(kinds) if kind in (CONTROL, UNKNOWN)]
