"""How byte-level vocabularies split text before merging, by GGUF's `tokenizer.ggml.pre`.

Names: llama.cpp's `llama-vocab.cpp`. Rules: the models' published tokenizer.json files; where there
is no published file (`default`), llama.cpp's.
"""

from __future__ import annotations

from tokenizers import Regex, normalizers, pre_tokenizers

from octavo.errors import Unsupported

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED = QWEN2.replace(r"| ?[^\s\p{L}\p{N}]+[\r\n]*", r"| ?[^\s\p{L}\p{N}\r\n]+")
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
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Cased letters, the ranges that these files list.
_CASED = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f "
    "386 388-38a 38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd "
    "1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 "
    "1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 "
    "1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 "
    "2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183-2184 "
    "2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2-2cf3 a640-a66d a680-a69b a722-a76f a771-a787 "
    "a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 "
    "104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943 "
)


def _ranges(listed: str) -> str:
    """Hexadecimal ranges as the inside of a regular expression's brackets."""
    ends = (r.partition("-") for r in listed.split())
    return "".join(chr(int(a, 16)) + dash + (chr(int(b, 16)) if b else "") for a, dash, b in ends)


DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_ranges(_CASED)}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _DEEPSEEK_CJK,
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK)
BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

LLAMA3_NAMES = (
    "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    "jina-v5-nano",
)  # fmt: skip
IGNORES_MERGES = (*LLAMA3_NAMES, "tekken", "gpt-4o")  # of whole words that they know
ADDS_BOS = (*LLAMA3_NAMES, "tekken", "gemma4")  # where the file does not say
NORMALIZED = ("qwen2", "qwen35")  # to composed characters
# The patterns that split text one after another; then single digits, for some.
PATTERNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*LLAMA3_NAMES, "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), (QWEN2,)),
    "qwen35": (QWEN35,),
    "seed-coder": (SEED,),
    "gpt-4o": (GPT4O,),
    "tekken": (TEKKEN,),
    "deepseek-v3": DEEPSEEK3,
    "deepseek-llm": DEEPSEEK_LLM,
    "deepseek-coder": DEEPSEEK_CODER,
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish", "viking"), (BLOOM,)),
    "default": DEFAULT,
}
DIGITS_LAST = ("deepseek-llm", "deepseek-coder", "viking")
GPT2 = (
    "gpt-2", "gpt2", "phi-2", "olmo", "mpt", "jais", "trillion", "exaone4", "mellum", "a.x-4.0",
    "gigachat", "modern-bert", "granite-docling", "jina-es", "jina-de", "jina-v1-en", "jina-v2-es",
    "jina-v2-de", "jina-v2-code", "roberta-bpe",
)  # fmt: skip
GPT2_DIGITS = (
    "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2",
)  # fmt: skip


def normalizer(name: str) -> normalizers.Normalizer | None:
    """What is done to text before it is split."""
    return normalizers.NFC() if name in NORMALIZED else None


def pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """The splitting rule of a name. Raises Unsupported."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in GPT2:
        return words
    digits = pre_tokenizers.Digits(individual_digits=True)
    if name in GPT2_DIGITS:
        return pre_tokenizers.Sequence([digits, words])
    if name == "falcon":
        punctuation, numbers = (
            pre_tokenizers.Punctuation("contiguous"),
            pre_tokenizers.Digits(individual_digits=False),
        )
        threes = pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")
        return pre_tokenizers.Sequence([punctuation, words, numbers, threes])
    if name in PATTERNS:
        splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in PATTERNS[name]]
        last = [digits] if name in DIGITS_LAST else []
        spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, *last, spell])
    known = ", ".join(sorted({*GPT2, *GPT2_DIGITS, *PATTERNS, "falcon", "gemma4"}))
    raise Unsupported(
        f"the file's pre-tokenizer is {name[:40]!r}   (tokenizer.ggml.pre)",
        f"supported: {known}",
        "use the model's Hugging Face folder, whose tokenizer.json is read whatever it says",
    )
