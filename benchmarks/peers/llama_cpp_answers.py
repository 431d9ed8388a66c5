"""llama.cpp's side of `vision.py answers`: what it answers, greedily, a line of JSON each.

python llama_cpp_answers.py MODEL.gguf MMPROJ.gguf THREADS

A line of its input: {"prompt": text with <__media__> for the picture, "pixels": base64 of RGB,
"size": [height, width], "most": tokens}. A line of its output: the answer's tokens.
"""

from __future__ import annotations

import base64
import ctypes
import json
import sys

# This file's folder must not hide packages of the same names as its neighbours.
sys.path.pop(0)
import llama_cpp as L
import numpy as np
from llama_cpp import mtmd_cpp as M

SILENT = L.llama_log_callback(lambda level, text, user: None)


def main() -> None:
    model_file, encoder_file, threads = sys.argv[1:]
    L.llama_log_set(SILENT, None)
    M.mtmd_helper_log_set(SILENT, None)
    model = L.llama_model_load_from_file(model_file.encode(), L.llama_model_default_params())
    given = L.llama_context_default_params()
    given.n_ctx, given.n_threads, given.n_threads_batch = 1024, int(threads), int(threads)
    given.type_k = given.type_v = 0  # fp32
    context = L.llama_init_from_model(model, given)
    params = M.mtmd_context_params_default()
    params.use_gpu, params.n_threads = False, int(threads)
    images = M.mtmd_init_from_file(encoder_file.encode(), model, params)
    for line in sys.stdin:
        print(json.dumps(answer(context, model, images, json.loads(line))), flush=True)


def answer(context: object, model: object, images: object, asked: dict) -> list[int]:
    """The tokens of an answer, the one that ends it left out."""
    height, width = asked["size"]
    pixels = base64.b64decode(asked["pixels"])
    data = (ctypes.c_ubyte * len(pixels)).from_buffer_copy(pixels)
    pictures = (M.mtmd_bitmap_p_ctypes * 1)(M.mtmd_bitmap_init(width, height, data))
    prompt = asked["prompt"].encode()
    text = M.mtmd_input_text(
        text=prompt, text_len=len(prompt), add_special=False, parse_special=True
    )
    chunks = M.mtmd_input_chunks_init()
    if M.mtmd_tokenize(images, chunks, ctypes.byref(text), pictures, 1):
        raise SystemExit("llama.cpp refuses the picture")
    L.llama_memory_clear(L.llama_get_memory(context), True)
    past = ctypes.c_int32(0)
    failed = M.mtmd_helper_eval_chunks(images, context, chunks, 0, 0, 512, True, ctypes.byref(past))
    if failed:
        raise SystemExit("llama.cpp cannot read the prompt")
    vocabulary, found = L.llama_model_get_vocab(model), []
    size = L.llama_vocab_n_tokens(vocabulary)
    while len(found) < asked["most"]:
        logits = np.ctypeslib.as_array(L.llama_get_logits_ith(context, -1), (size,))
        token = int(logits.argmax())
        if L.llama_vocab_is_eog(vocabulary, token):
            break
        found.append(token)
        one = (L.llama_token * 1)(token)
        if L.llama_decode(context, L.llama_batch_get_one(one, 1)):
            raise SystemExit("llama.cpp cannot go on")
    M.mtmd_bitmap_free(pictures[0])
    M.mtmd_input_chunks_free(chunks)
    return found


main()
