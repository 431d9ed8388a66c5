"""llama.cpp's quantizer.

python llama_cpp_quantize.py MODEL.gguf Q4_K_M OUTPUT.gguf
"""

from __future__ import annotations

import sys

# This file's folder must not hide packages of the same names as its neighbours.
sys.path.pop(0)
import llama_cpp as L


def main() -> None:
    model, kind, output = sys.argv[1:]
    params = L.llama_model_quantize_default_params()
    params.nthread, params.ftype = 2, getattr(L, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if L.llama_model_quantize(model.encode(), output.encode(), params):
        raise SystemExit(f"llama.cpp cannot quantize {model}")


if __name__ == "__main__":
    main()
