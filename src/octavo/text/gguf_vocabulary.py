"""A `tokenizers.Tokenizer` from GGUF metadata: BPE over bytes or characters, or WordPiece."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HfTokenizer
from tokenizers.models import BPE, WordPiece

from octavo.errors import CheckpointError, Unsupported
from octavo.text import splitting

Metadata = Mapping[str, Any]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"
BERT_CONTROL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# SentencePiece's merges are found by cutting every token everywhere.
MAX_CHARACTERS = 8 << 20
MAX_LENGTH = 512


def _merges(metadata: Metadata) -> list[tuple[str, str]]:
    """Parses merges ("left right"). Either side may itself begin with a space."""
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not all(isinstance(m, str) for m in merges):
        raise CheckpointError("the vocabulary has no merges")
    cuts = [m.find(" ", 1) for m in merges]
    if min(cuts, default=0) < 0:
        wrong = merges[cuts.index(-1)]
        raise CheckpointError(f"the vocabulary's merge {wrong[:40]!r} is not of two parts")
    return [(m[:at], m[at + 1 :]) for m, at in zip(merges, cuts, strict=True)]


def _byte_level(metadata: Metadata, tokens: list[str], kinds: list[int]) -> HfTokenizer:
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    if name == "gemma4":
        return _gemma4(metadata, tokens, kinds)
    vocabulary, merges = {t: i for i, t in enumerate(tokens)}, _merges(metadata)
    ignore = name in splitting.IGNORES_MERGES
    tokenizer = HfTokenizer(BPE(vocabulary, merges, ignore_merges=ignore))
    if (normalizer := splitting.normalizer(name)) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splitting.pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _unknown(metadata: Metadata, tokens: list[str], default: int) -> str | None:
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", default)
    known = isinstance(unknown, int) and 0 <= unknown < len(tokens)
    return tokens[unknown] if known else None


def _with_bytes(
    metadata: Metadata, tokens: list[str], merges: list[tuple[str, str]], default: int
) -> HfTokenizer:
    """Merges over whole text in which spaces are marked; other bytes have tokens of their own."""
    return HfTokenizer(
        BPE(
            {t: i for i, t in enumerate(tokens)}, merges, fuse_unk=True, byte_fallback=True,
            unk_token=_unknown(metadata, tokens, default),
        )
    )  # fmt: skip


def _gemma4(metadata: Metadata, tokens: list[str], kinds: list[int]) -> HfTokenizer:
    tokenizer = _with_bytes(metadata, tokens, _merges(metadata), 3)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
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


def _sentencepiece(metadata: Metadata, tokens: list[str], kinds: list[int]) -> HfTokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError("the vocabulary has no scores")
    if not all(isinstance(score, int | float) for score in scores):
        raise CheckpointError("the vocabulary's scores are not numbers")
    characters, longest = sum(map(len, tokens)), max(map(len, tokens))
    if characters > MAX_CHARACTERS or longest > MAX_LENGTH:
        raise CheckpointError(
            f"the vocabulary has {characters} characters, up to {longest} a token; "
            f"{MAX_CHARACTERS} and {MAX_LENGTH} at most"
        )
    tokenizer = _with_bytes(metadata, tokens, merges_from_scores(tokens, scores), 0)
    replace = normalizers.Replace(" ", SPACE)
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace])
    else:
        tokenizer.normalizer = replace
    return tokenizer


def _wordpiece(metadata: Metadata, tokens: list[str], kinds: list[int]) -> HfTokenizer:
    """BERT's: GGUF marks the beginnings of words, the original everything else, with ##."""

    def original(token: str, kind: int) -> str:
        if kind == CONTROL or token in BERT_CONTROL:
            return token
        return token[1:] if token.startswith(SPACE) else "##" + token

    pieces = {original(t, k): i for i, (t, k) in enumerate(zip(tokens, kinds, strict=True))}
    if len(pieces) != len(tokens):
        raise CheckpointError("the vocabulary names a piece twice")

    def token(key: str, default: str) -> tuple[str, int]:
        found = metadata.get(f"tokenizer.ggml.{key}_token_id", pieces.get(default))
        if not isinstance(found, int) or not 0 <= found < len(tokens):
            raise CheckpointError(f"the vocabulary has no {default} token")
        return tokens[found], found

    unknown, first, last = (
        token("unknown", "[UNK]"),
        token("bos", "[CLS]"),
        token("seperator", "[SEP]"),
    )
    tokenizer = HfTokenizer(WordPiece(pieces, unk_token=unknown[0], max_input_chars_per_word=100))
    lower = bool(metadata.get("tokenizer.ggml.normalizer.lowercase", True))
    accents = bool(metadata.get("tokenizer.ggml.normalizer.strip_accents", lower))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=accents, lowercase=lower
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    first, last = token("bos", "[CLS]"), token("seperator", "[SEP]")  # as GGUF spells it
    tokenizer.post_processor = processors.BertProcessing(last, first)
    return tokenizer


BUILDERS = {
    "gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _gemma4, "bert": _wordpiece,
}  # fmt: skip


def adds_bos(metadata: Metadata) -> bool:
    """True if plain prompts begin with the bos token."""
    model, pre = (str(metadata.get(f"tokenizer.ggml.{key}")) for key in ("model", "pre"))
    usual = model in ("llama", "gemma4") or pre in splitting.ADDS_BOS
    return bool(metadata.get("tokenizer.ggml.add_bos_token", usual))


def build(metadata: Metadata) -> tuple[HfTokenizer, list[int]]:
    """The tokenizer and the ids of its control tokens. Raises CheckpointError or Unsupported."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise CheckpointError("the file has no vocabulary (tokenizer.ggml.tokens)")
    if len(set(tokens)) != len(tokens):
        raise CheckpointError("the vocabulary names a token twice")
    kinds = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise CheckpointError("the vocabulary's token types do not match its tokens")
    model = str(metadata.get("tokenizer.ggml.model"))
    if model not in BUILDERS:
        raise Unsupported(
            f"tokenizer model {model[:40]!r}; {', '.join(BUILDERS)} are read",
            "use the model's Hugging Face folder, whose tokenizer.json is read whatever it says",
        )
    tokenizer = BUILDERS[model](metadata, tokens, kinds)
    tokenizer.add_tokens(
        [
            AddedToken(t, normalized=False, special=False)
            for t, kind in zip(tokens, kinds, strict=True)
            if kind == USER_DEFINED
        ]
    )
    return tokenizer, [i for i, kind in enumerate(kinds) if kind in (CONTROL, UNKNOWN)]
