"""AutoRound's learned rounding, 4 bits with zeros in groups of 64, over given tokens.

python auto_round_folder.py FOLDER ITERATIONS TOKENS.json OUTPUT

ITERATIONS of a block: 200 by its default, 50 in its light recipe.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

# This file's folder must not hide packages of the same names as its neighbours.
sys.path.pop(0)
import torch
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    folder, iterations, tokens, output = sys.argv[1:]
    with open(tokens) as file:
        ids = torch.tensor(json.load(file))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tuned = AutoRound(
        model, AutoTokenizer.from_pretrained(folder), "W4A16", group_size=64, sym=False,
        iters=int(iterations), dataset=[{"input_ids": x[None]} for x in ids],
        seqlen=ids.shape[1], nsamples=len(ids), device_map="cpu",
    )  # fmt: skip
    tuned.quantize_and_save(output, format="auto_awq")
    made = next(Path(output).rglob("config.json")).parent
    if made != Path(output):  # it makes a folder in the one that is named
        for file in made.iterdir():
            file.rename(Path(output) / file.name)
        made.rmdir()


if __name__ == "__main__":
    main()
