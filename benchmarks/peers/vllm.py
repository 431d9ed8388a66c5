"""vLLM's side of compare.py, in bf16: it gets a Hugging Face folder made from the GGUF."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from program import run
from timing import measure
from vllm_folder import convert

# This file's name must not hide the package.
sys.path.pop(0)


def speeds(path: str, threads: int, cases: dict[str, list[int]]) -> dict[str, dict[str, float]]:
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
    os.environ["HF_HUB_OFFLINE"] = "1"
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        convert(Path(path), Path(folder))
        llm = LLM(folder, dtype="bfloat16", skip_tokenizer_init=True, enable_prefix_caching=False)
        rng = __import__("random").Random(0)

        def seconds(streams: int, prompt: int, output: int) -> float:
            prompts = [
                {"prompt_token_ids": [rng.randrange(10, 49000) for _ in range(prompt)]}
                for _ in range(streams)
            ]
            params = SamplingParams(
                temperature=0, max_tokens=output, ignore_eos=True, detokenize=False
            )
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - began

        return measure(seconds, cases)


if __name__ == "__main__":
    run(speeds)
