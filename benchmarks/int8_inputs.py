"""What a folder loses whose layers take int8 inputs, computed as its config.json says.

    python benchmarks/int8_inputs.py FOLDER-W8A8 --against FOLDER --tokens 4096

Octavo's own kernels give inputs 16 bits unless `--activations int8` is asked for, and then steps of
their own, so this computes with the torch reference: each input is rounded to int8 with the layer's
step, or with one for each token.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from octavo.backends.torch.reference import Reference, ReferenceInputs
from octavo.checkpoint import Checkpoint, open_checkpoint
from octavo.checkpoint.base import GROUPED
from octavo.compress.data import split, token_blocks
from octavo.compress.distributions import divergence
from octavo.compress.groups import whole
from octavo.compress.smoothquant import int8_inputs
from octavo.models import build_program
from octavo.program import Linear, Op, Program
from octavo.text.tokenizer import load_tokenizer

LENGTH = 512


@dataclass(frozen=True)
class Lost:
    """Nats a token, with the standard error of the mean of tokens' differences."""

    nll: float
    nll_error: float
    kl: float
    top1: float

    @property
    def perplexity(self) -> float:
        """Percent that it grows by."""
        return 100 * float(np.expm1(self.nll))


class Int8Inputs(Reference):
    """steps: of inputs, by the layers that take them as int8; None: each token has its own."""

    def __init__(self, program: Program, steps: Mapping[str, float | None]) -> None:
        super().__init__(program)
        self.steps = steps

    def run(self, op: Op, v: dict[int, Any], x: ReferenceInputs) -> torch.Tensor:
        if isinstance(op, Linear) and (name := whole(op.weight.tensor)[0]) in self.steps:
            held = int8_inputs(v[op.x.id].numpy(), self.steps[name])
            v = {op.x.id: torch.from_numpy(held)}
        return super().run(op, v, x)


def steps_of(checkpoint: Checkpoint) -> dict[str, float | None]:
    """The layers of a folder that take int8 inputs, and the steps that are stored."""
    config = checkpoint.metadata.get("quantization_config") or {}
    groups = config.get("config_groups", {}).values()
    inputs = [g.get("input_activations") or {} for g in groups]
    if not any((i.get("num_bits"), i.get("type")) == (8, "int") for i in inputs):
        return {}
    steps: dict[str, float | None] = {
        n: None for n, t in checkpoint.tensors.items() if t.type in GROUPED
    }
    for file in checkpoint.sources:
        with safe_open(file, "np") as stored:
            for name in stored.keys():
                if name.endswith(".input_scale"):
                    steps[name.replace("input_scale", "weight")] = float(stored.get_tensor(name)[0])
    return steps


def lost(model: Path, against: Path, tokens: int) -> Lost:
    """Of a model from the one that it was made from, on text that none is calibrated with."""
    a, b = open_checkpoint(model), open_checkpoint(against)
    blocks = token_blocks(split("evaluation"), load_tokenizer(b), LENGTH, tokens // LENGTH)
    ours, theirs = Int8Inputs(build_program(a), steps_of(a)), Reference(build_program(b))
    found = []
    for ids in blocks:
        p, q = (r.logits(ids.tolist())[:-1].numpy() for r in (ours, theirs))
        nll_a, nll_b, kl = divergence(p, q, ids[1:])
        found.append((nll_a - nll_b, kl, p.argmax(1) == q.argmax(1)))
    nll, kl, same = (np.concatenate(each) for each in zip(*found, strict=True))
    error = nll.std(ddof=1) / np.sqrt(len(nll))
    return Lost(float(nll.mean()), float(error), float(kl.mean()), float(same.mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--against", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args()
    found = lost(args.model, args.against, args.tokens)
    layers = len(steps_of(open_checkpoint(args.model)))
    print(
        f"{layers} layers take int8: {found.nll:+.4f} ± {found.nll_error:.4f} nats a token, "
        f"perplexity {found.perplexity:+.2f} %, KL {found.kl:.4f}, same top-1 {found.top1:.1%}"
    )
    print(json.dumps(vars(found)))


if __name__ == "__main__":
    main()
