"""llm-compressor's GPTQ or AWQ, 4 bits with zeros in groups of 64, over given tokens.

python llm_compressor.py FOLDER gptq|awq TOKENS.json OUTPUT
"""

from __future__ import annotations

import json
import sys
from typing import Any

# This file's folder must not hide packages of the same names as its neighbours.
sys.path.pop(0)
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from transformers import AutoModelForCausalLM


def main() -> None:
    folder, method, tokens, output = sys.argv[1:]
    if not torch.accelerator.is_available():  # which AWQ pins memory for, without asking
        torch.Tensor.pin_memory = lambda self, *_: self
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    with open(tokens) as file:
        ids = json.load(file)
    data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(i) for i in ids]})
    weights = QuantizationArgs(
        num_bits=4, type="int", symmetric=False, strategy="group", group_size=64
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    of: dict[str, Any] = {"config_groups": {"group_0": scheme}, "ignore": ["lm_head"]}
    recipe = (
        [GPTQModifier(**of)] if method == "gptq" else [AWQModifier(), QuantizationModifier(**of)]
    )
    oneshot(
        model=model, dataset=data, recipe=recipe, max_seq_length=len(ids[0]),
        num_calibration_samples=len(ids),
    )  # fmt: skip
    model.save_pretrained(output, save_compressed=True)


if __name__ == "__main__":
    main()
