"""llama.cpp's side of `vision.py encoder`: encodes a picture for each line that it reads.

python llama_cpp_vision.py MODEL.gguf MMPROJ.gguf THREADS
"""

from __future__ import annotations

import ctypes
import sys

# This file's folder must not hide packages of the same names as its neighbours.
sys.path.pop(0)
import llama_cpp as L
import numpy as np
from llama_cpp import mtmd_cpp as M

SIDE = 336
MARKER = b"<__media__>"
SILENT = L.llama_log_callback(lambda level, text, user: None)


def main() -> None:
    model_file, encoder_file, threads = sys.argv[1:]
    L.llama_log_set(SILENT, None)
    M.mtmd_helper_log_set(SILENT, None)
    model = L.llama_model_load_from_file(model_file.encode(), L.llama_model_default_params())
    params = M.mtmd_context_params_default()
    params.use_gpu, params.n_threads = False, int(threads)
    context = M.mtmd_init_from_file(encoder_file.encode(), model, params)
    pixels = np.random.default_rng(1).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    data = (ctypes.c_ubyte * pixels.size).from_buffer_copy(pixels.tobytes())
    pictures = (M.mtmd_bitmap_p_ctypes * 1)(M.mtmd_bitmap_init(SIDE, SIDE, data))
    text = M.mtmd_input_text(
        text=MARKER, text_len=len(MARKER), add_special=False, parse_special=True
    )
    chunks = M.mtmd_input_chunks_init()
    if M.mtmd_tokenize(context, chunks, ctypes.byref(text), pictures, 1):
        raise SystemExit("llama.cpp refuses the picture")
    count = M.mtmd_input_chunks_size(chunks)
    (image,) = (
        chunk for chunk in (M.mtmd_input_chunks_get(chunks, i) for i in range(count))
        if M.mtmd_input_chunk_get_type(chunk) == M.MTMD_INPUT_CHUNK_TYPE_IMAGE
    )  # fmt: skip
    for _ in sys.stdin:
        if M.mtmd_encode_chunk(context, image):
            raise SystemExit("llama.cpp cannot encode the picture")
        print("done", flush=True)


main()
