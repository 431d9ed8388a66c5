"""OpenVINO GenAI's side of compare.py: its continuous-batching backend reads the same GGUF.

It gives no distributions itself, but writes the model that it makes of a GGUF; that is run by
OpenVINO, whose linear layers are the same."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from program import run
from timing import measure

# This file's name must not hide the package.
sys.path.pop(0)
import numpy as np
import openvino
import openvino_genai as genai

# Whether it computes in bf16 goes by the processor, whatever it is restricted to, and takes twice
# the time or fails where tiles are kept from it.
FLOATS = {"INFERENCE_PRECISION_HINT": "f32"} if "ONEDNN_MAX_CPU_ISA" in os.environ else {}


def speeds(path: str, threads: int, cases: dict[str, list[int]]) -> dict[str, dict[str, float]]:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_batched_tokens = 512
    scheduler.enable_prefix_caching = False
    pipe = genai.LLMPipeline(
        path, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads, **FLOATS
    )
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

    return measure(seconds, cases)


def distributions(path: str, threads: int) -> Callable[[list[int]], np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder) / Path(path).name
        link.symlink_to(Path(path).resolve())
        genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
        model = openvino.Core().compile_model(
            f"{folder}/openvino_model.xml", "CPU", {"INFERENCE_NUM_THREADS": threads} | FLOATS
        )

    def logits(ids: list[int]) -> np.ndarray:
        n = len(ids)
        request = model.create_infer_request()
        given = {
            "input_ids": np.array([ids]),
            "attention_mask": np.ones((1, n), np.int64),
            "position_ids": np.arange(n)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        return request.infer(given)["logits"][0]

    return logits


if __name__ == "__main__":
    run(speeds, distributions)
