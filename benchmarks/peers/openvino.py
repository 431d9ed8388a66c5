"""OpenVINO GenAI's side of compare.py: its continuous-batching backend reads the same GGUF. Prints JSON."""

from __future__ import annotations

import json
import sys
import time

from timing import measure

# This file's name must not hide the package.
sys.path.pop(0)
import numpy as np
import openvino
import openvino_genai as genai


def main(path: str, threads: int, cases: dict[str, list[int]]) -> None:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_batched_tokens = 512
    scheduler.enable_prefix_caching = False
    pipe = genai.LLMPipeline(path, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads)
    rng = np.random.default_rng(0)

    def seconds(streams: int, prompt: int, output: int) -> float:
        ids = rng.integers(10, 49000, (streams, prompt)).astype(np.int64)
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        config = genai.GenerationConfig()
        config.max_new_tokens = output
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        began = time.perf_counter()
        pipe.generate(inputs, config)
        return time.perf_counter() - began

    results = measure(seconds, cases)
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
