"""GPTQModel's GPTQ or AWQ, 4 bits with zeros in groups of 64, over given tokens.

python gptqmodel_folder.py FOLDER gptq|awq TOKENS.json OUTPUT
"""

from __future__ import annotations

import json
import os
import sys

# This file's folder must not hide packages of the same names as its neighbours.
sys.path.pop(0)
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it wants one, and refuses that on two cores
import torch
from gptqmodel import GPTQModel, QuantizeConfig
from gptqmodel.quantization import FORMAT, METHOD

METHODS = {
    "gptq": {"desc_act": True, "static_groups": True, "act_group_aware": False},
    "awq": {"quant_method": METHOD.AWQ, "format": FORMAT.GEMM},
}


def main() -> None:
    folder, method, tokens, output = sys.argv[1:]
    with open(tokens) as file:
        ids = torch.tensor(json.load(file))
    data = [{"input_ids": x[None], "attention_mask": torch.ones_like(x)[None]} for x in ids]
    config = QuantizeConfig(bits=4, group_size=64, sym=False, **METHODS[method])
    model = GPTQModel.load(folder, config, device="cpu")
    model.quantize(data, batch_size=4)
    model.save(output)


if __name__ == "__main__":
    main()
