"""Names that other programs use for well-known models, and where those are on the model hub.

Only suggested: nothing here is fetched unless it is asked for by its id.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

KNOWN = {
    "deepseek-r1:1.5b": "bartowski/DeepSeek-R1-Distill-Qwen-1.5B-GGUF:Q4_K_M",
    "deepseek-r1:7b": "bartowski/DeepSeek-R1-Distill-Qwen-7B-GGUF:Q4_K_M",
    "deepseek-r1:8b": "bartowski/DeepSeek-R1-Distill-Llama-8B-GGUF:Q4_K_M",
    "gemma2:2b": "bartowski/gemma-2-2b-it-GGUF:Q4_K_M",
    "gemma2:9b": "bartowski/gemma-2-9b-it-GGUF:Q4_K_M",
    "gemma3:1b": "ggml-org/gemma-3-1b-it-GGUF:Q4_K_M",
    "gemma3:4b": "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M",
    "gemma3:12b": "ggml-org/gemma-3-12b-it-GGUF:Q4_K_M",
    "gpt-oss:20b": "ggml-org/gpt-oss-20b-GGUF",
    "gpt-oss:120b": "ggml-org/gpt-oss-120b-GGUF",
    "llama3:8b": "bartowski/Meta-Llama-3-8B-Instruct-GGUF:Q4_K_M",
    "llama3.1:8b": "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M",
    "llama3.2:1b": "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M",
    "llama3.2:3b": "bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M",
    "llama3.3:70b": "bartowski/Llama-3.3-70B-Instruct-GGUF:Q4_K_M",
    "mistral:7b": "bartowski/Mistral-7B-Instruct-v0.3-GGUF:Q4_K_M",
    "mixtral:8x7b": "TheBloke/Mixtral-8x7B-Instruct-v0.1-GGUF:Q4_K_M",
    "olmo2:7b": "allenai/OLMo-2-1124-7B-Instruct-GGUF:Q4_K_M",
    "phi3:3.8b": "microsoft/Phi-3-mini-4k-instruct-gguf:q4",
    "phi4:14b": "bartowski/phi-4-GGUF:Q4_K_M",
    "qwen2.5:0.5b": "Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M",
    "qwen2.5:1.5b": "Qwen/Qwen2.5-1.5B-Instruct-GGUF:Q4_K_M",
    "qwen2.5:3b": "Qwen/Qwen2.5-3B-Instruct-GGUF:Q4_K_M",
    "qwen2.5:7b": "Qwen/Qwen2.5-7B-Instruct-GGUF:Q4_K_M",
    "qwen2.5-coder:1.5b": "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M",
    "qwen2.5-coder:7b": "Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M",
    "qwen3:0.6b": "Qwen/Qwen3-0.6B-GGUF:Q8_0",
    "qwen3:1.7b": "Qwen/Qwen3-1.7B-GGUF:Q8_0",
    "qwen3:4b": "Qwen/Qwen3-4B-GGUF:Q4_K_M",
    "qwen3:8b": "Qwen/Qwen3-8B-GGUF:Q4_K_M",
    "qwen3:14b": "Qwen/Qwen3-14B-GGUF:Q4_K_M",
    "qwen3:30b": "Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M",
    "smollm2:135m": "smollm2",
    "smollm2:360m": "HuggingFaceTB/SmolLM2-360M-Instruct-GGUF:Q8_0",
    "smollm2:1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF:Q4_K_M",
    "tinyllama:1.1b": "TheBloke/TinyLlama-1.1B-Chat-v1.0-GGUF:Q4_K_M",
    "all-minilm:22m": "sentence-transformers/all-MiniLM-L6-v2",
}
FEW = 3


def suggest(name: str, here: Iterable[str]) -> tuple[str, ...]:
    """Up to three suggestions: models in the cache, or the hub's name of a well-known model."""
    asked = name.lower()
    family, _, tag = asked.partition(":")
    if asked in KNOWN:
        return (KNOWN[asked],)
    if close := difflib.get_close_matches(name, list(here), FEW, 0.6):
        return tuple(close)
    families = list(dict.fromkeys(known.partition(":")[0] for known in KNOWN))
    same = family if family in families else "".join(_close(family, families))
    tags = {k.partition(":")[2]: v for k, v in KNOWN.items() if k.partition(":")[0] == same}
    size = tag.partition("-")[0]  # 1b of 1b-instruct-q4_K_M
    return (tags[size],) if size in tags else tuple(tags.values())[:FEW]


def _close(family: str, families: list[str]) -> list[str]:
    """The family with this name in another spelling: llama-3.2, Qwen 2.5."""
    plain = {f.replace("-", ""): f for f in families}
    spelled = family.replace("-", "").replace(" ", "").replace("_", "")
    return [plain[f] for f in difflib.get_close_matches(spelled, plain, 1, 0.8)]
