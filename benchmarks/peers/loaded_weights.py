"""The weights of a quantized folder as its format's own loader reads them, in fp32.

python loaded_weights.py FOLDER OUTPUT.npz

GPTQModel for gptq and awq, transformers with compressed-tensors for that. Scales are widened
before weights are multiplied with them, as the fp16 that loaders compute with would round.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# This file's folder must not hide packages of the same names as its neighbours.
sys.path.pop(0)
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it wants one, and refuses that on two cores
import numpy as np
import torch


def by_gptqmodel(folder: str, method: str) -> Iterator[tuple[str, torch.Tensor]]:
    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    backend = BACKEND.GPTQ_TORCH if method == "gptq" else BACKEND.AWQ_TORCH
    model = GPTQModel.load(folder, backend=backend, device="cpu", dtype=torch.float16)
    for name, layer in model.model.named_modules():
        if not hasattr(layer, "qweight"):
            continue
        layer.scales = layer.scales.float()
        if method == "gptq":
            weight = type(layer).dequantize_weight(layer)
        else:
            weight = dequantize_gemm(
                layer.qweight, layer.qzeros, layer.scales, layer.bits, layer.group_size
            )
        yield name, weight.T


def by_transformers(folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    how = CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=how, dtype=torch.float32
    )
    for name, layer in model.named_modules():
        if hasattr(layer, "quantization_scheme"):
            yield name, layer.weight


def main() -> None:
    folder, output = sys.argv[1:]
    config = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]
    method = config["quant_method"]
    found = by_gptqmodel(folder, method) if method in ("gptq", "awq") else by_transformers(folder)
    np.savez(output, **{f"{n}.weight": w.detach().float().numpy() for n, w in found})


if __name__ == "__main__":
    main()
