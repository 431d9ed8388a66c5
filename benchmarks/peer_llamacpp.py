"""llama.cpp's side of compare_llamacpp.py: runs in an environment of its own, prints JSON.

Calls the C API directly (llama_decode on batches of ids), so that nothing of the Python binding is
timed but one call per step. Greedy decoding; the argmax is not timed.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import time

import llama_cpp as L
import numpy as np


def main(path: str, prompt: int, output: int, threads: int, repeats: int) -> None:
    L.llama_backend_init()
    silent = L.llama_log_callback(lambda level, text, user: None)
    L.llama_log_set(silent, ctypes.c_void_p(0))
    model = L.llama_model_load_from_file(path.encode(), L.llama_model_default_params())
    params = L.llama_context_default_params()
    params.n_ctx = prompt + output + 16
    params.n_batch = params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = threads
    context = L.llama_init_from_model(model, params)
    vocabulary = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))

    def decode(ids: list[int]) -> None:
        array = (L.llama_token * len(ids))(*ids)
        assert L.llama_decode(context, L.llama_batch_get_one(array, len(ids))) == 0
        L.llama_synchronize(context)

    ids = np.random.default_rng(1).integers(3, vocabulary, prompt).tolist()
    prefill, decoding = [], []
    for i in range(repeats + 1):
        L.llama_memory_clear(L.llama_get_memory(context), True)
        began = time.perf_counter()
        decode(ids)
        first = time.perf_counter()
        spent = 0.0
        for _ in range(output - 1):
            logits = np.ctypeslib.as_array(L.llama_get_logits_ith(context, -1), (vocabulary,))
            token = int(logits.argmax())
            before = time.perf_counter()
            decode([token])
            spent += time.perf_counter() - before
        if i:
            prefill.append(prompt / (first - began))
            decoding.append((output - 1) / spent)
    print(
        json.dumps(
            {"prefill_tps": statistics.median(prefill), "decode_tps": statistics.median(decoding)}
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
