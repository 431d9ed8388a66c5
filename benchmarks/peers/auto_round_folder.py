"""AutoRound's rounding, 4 bits with zeros in groups of 64, learned over given tokens.

python auto_round_folder.py FOLDER ITERATIONS TOKENS.json OUTPUT
"""

from __future__ import annotations

import json
import sys

# This file's folder must not hide packages of the same names as its neighbours.
sys.path.pop(0)
import torch
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    folder, iterations, tokens, output = sys.argv[1:]
    with open(tokens) as file:
        ids = torch.tensor(json.load(file))
    data = torch.utils.data.DataLoader(
        [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in ids]
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    rounder = AutoRound(
        model, tokenizer=AutoTokenizer.from_pretrained(folder), bits=4, group_size=64, sym=False,
        dataset=data, iters=int(iterations), nsamples=len(ids), seqlen=ids.shape[1], batch_size=4,
        device_map="cpu",
    )  # fmt: skip
    rounder.quantize_and_save(output, format="auto_gptq")


if __name__ == "__main__":
    main()
