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

NGRAM = {
    "method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 5,
}  # fmt: skip


def counted(llm: Any) -> list[int]:
    """Tokens drafted and accepted so far."""
    found = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
    names = [f"vllm:spec_decode_num_{kind}_tokens" for kind in ("draft", "accepted")]
    return [int(found.get(name, 0)) for name in names]


def seconds(llm: Any, ids: list[int], tokens: int) -> float:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    return time.perf_counter() - began


def rounds(folder: str, count: int, cases: dict[str, Any]) -> dict[str, list[Any]]:
    from vllm import LLM

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
    from vllm_folder import convert

    sys.path.pop(0)  # this folder's names must not hide packages
    model, threads, count, cases = sys.argv[1:5]
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{int(threads) - 1}"
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as made:
        convert(Path(model), Path(made))
        print(json.dumps(rounds(made, int(count), json.loads(cases))))
