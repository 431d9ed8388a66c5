"""ONNX Runtime GenAI's side of compare.py: reads ONNX folders only, so a GGUF file ends in its own error."""

from __future__ import annotations

import sys

# This file's name must not hide the package.
sys.path.pop(0)
import onnxruntime_genai

if __name__ == "__main__":
    onnxruntime_genai.Model(sys.argv[1])
    sys.exit("loaded the model, but nobody has written how to time it: extend this file")
