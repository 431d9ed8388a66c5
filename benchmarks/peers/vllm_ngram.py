"""vLLM's side of speculation.py, in bf16: without drafts and with those of its n-gram mode, by turns.

python vllm_ngram.py MODEL THREADS ROUNDS '{"copy": [[1, 2, 3], 192]}'   # {case: [ids, tokens]}

Prints JSON: by case, a list of rounds, each with both ways' seconds after the first token, and the
tokens drafted and accepted.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_folder import convert

# This folder's names must not hide packages.
sys.path.pop(0)

NGRAM = {
    "method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 5,
}  # fmt: skip


def counted(llm: Any) -> tuple[int, int]:
    """Tokens drafted and accepted so far."""
    found = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
    return tuple(
        int(found.get(f"vllm:spec_decode_num_{kind}_tokens", 0)) for kind in ("draft", "accepted")
    )  # type: ignore[return-value]


def seconds(llm: Any, ids: list[int], tokens: int) -> float:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    return time.perf_counter() - began


def rounds(path: str, threads: int, count: int, cases: dict[str, Any]) -> dict[str, list[Any]]:
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
    os.environ["HF_HUB_OFFLINE"] = "1"
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        convert(Path(path), Path(folder))
        common: dict[str, Any] = {
            "dtype": "bfloat16", "skip_tokenizer_init": True, "enable_prefix_caching": False,
            "max_model_len": 2048, "disable_log_stats": False,
        }  # fmt: skip
        ways = {
            "vLLM": LLM(folder, **common),
            "vLLM n-gram": LLM(folder, speculative_config=NGRAM, **common),
        }
        out: dict[str, list[Any]] = {name: [] for name in cases}
        for name, (ids, tokens) in cases.items():
            for turn in range(count + 1):
                found = {}
                for way, llm in ways.items():
                    first, before = seconds(llm, ids, 1), counted(llm)
                    writing = seconds(llm, ids, tokens) - first
                    drafts = [b - a for a, b in zip(before, counted(llm), strict=True)]
                    found[way] = [writing, tokens - 1, *drafts]
                out[name] += [found] if turn else []  # the first warms up
    return out


if __name__ == "__main__":
    model, threads, count, cases = sys.argv[1:5]
    print(json.dumps(rounds(model, int(threads), int(count), json.loads(cases))))
