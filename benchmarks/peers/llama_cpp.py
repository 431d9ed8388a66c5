"""llama.cpp's side of compare.py.

Calls the C API directly (llama_decode on batches of ids), so that nothing of the Python binding is
timed but one call per step. Greedy decoding; the argmax is not timed. Flash attention is on.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path

from program import run

# This file's folder must not hide packages of the same names as its neighbours.
sys.path.pop(0)
import llama_cpp as L
import numpy as np

SILENT = L.llama_log_callback(lambda level, text, user: None)


class Streams:
    """Sequences decoded together in one context."""

    def __init__(self, model: ctypes.c_void_p, count: int, tokens: int, threads: int) -> None:
        params = L.llama_context_default_params()
        params.n_ctx = count * tokens
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = count
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = 1
        self.context = L.llama_init_from_model(model, params)
        self.vocabulary = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))
        self.batch = L.llama_batch_init(512, 0, 1)

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """One call; rows of (token, position, sequence, whether logits are wanted)."""
        b = self.batch
        b.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = token, position, 1, wanted
            b.seq_id[i][0] = sequence
        assert L.llama_decode(self.context, b) == 0
        L.llama_synchronize(self.context)

    def logits(self, row: int) -> np.ndarray:
        logits = L.llama_get_logits_ith(self.context, row)
        return np.ctypeslib.as_array(logits, (self.vocabulary,))

    def best(self, row: int) -> int:
        return int(self.logits(row).argmax())

    def run(self, count: int, prompt: int, output: int) -> dict[str, float]:
        ids = np.random.default_rng(1).integers(3, self.vocabulary, (count, prompt)).tolist()
        began = time.perf_counter()
        tokens = []
        for s in range(count):
            for first in range(0, prompt, 512):
                part = ids[s][first : first + 512]
                last = prompt - 1
                rows = [(t, first + i, s, first + i == last) for i, t in enumerate(part)]
                self.decode(rows)
            tokens.append(self.best(len(rows) - 1))
        prefilled = time.perf_counter() - began
        spent = 0.0
        for step in range(output - 1):
            before = time.perf_counter()
            self.decode([(t, prompt + step, s, True) for s, t in enumerate(tokens)])
            spent += time.perf_counter() - before
            tokens = [self.best(s) for s in range(count)]
        return {
            "prefill_tps": count * prompt / prefilled,
            "decode_tps": count * (output - 1) / spent,
        }

    def close(self) -> None:
        L.llama_batch_free(self.batch)
        L.llama_free(self.context)


def load(path: str) -> ctypes.c_void_p:
    L.llama_backend_init()
    L.llama_log_set(SILENT, ctypes.c_void_p(0))
    params = L.llama_model_default_params()
    # Without its AMX buffers: llama.cpp of llama-cpp-python 0.3.36 crashes in them on this model.
    # Elsewhere it has weights in the order that its kernels like best.
    params.use_extra_bufts = "amx_int8" not in Path("/proc/cpuinfo").read_text()
    return L.llama_model_load_from_file(path.encode(), params)


def speeds(path: str, threads: int, cases: dict[str, list[int]]) -> dict[str, dict[str, float]]:
    model, results = load(path), {}
    for name, (count, prompt, output) in cases.items():
        warm = Streams(model, 1, 64, threads)
        warm.run(1, 16, 4)
        warm.close()
        streams = Streams(model, count, prompt + output + 16, threads)
        results[name] = streams.run(count, prompt, output)
        streams.close()
    return results


def distributions(path: str, threads: int) -> Callable[[list[int]], np.ndarray]:
    model = load(path)

    def logits(ids: list[int]) -> np.ndarray:
        document = Streams(model, 1, len(ids), threads)
        document.decode([(token, i, 0, True) for i, token in enumerate(ids)])
        found = np.stack([document.logits(i) for i in range(len(ids))])
        document.close()
        return found

    return logits


if __name__ == "__main__":
    run(speeds, distributions)
