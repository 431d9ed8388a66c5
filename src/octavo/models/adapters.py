"""Maps the modules that LoRA adapters name to the program's matrices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from octavo.checkpoint import Checkpoint
from octavo.models import gpt2, phi, phi3, starcoder2
from octavo.models.names import GGUF_NAMES, HF_NAMES
from octavo.program import Linear, Program, Rope

MODULES = ("qkv", "q", "k", "v", "o", "gate", "up", "down")
# GGUF architectures whose Hugging Face names are not HF_NAMES.
NAMES: dict[str, dict[str, str]] = {
    "gpt2": gpt2.NAMES, "phi2": phi.NAMES, "phi3": phi3.NAMES, "starcoder2": starcoder2.NAMES,
}  # fmt: skip
_PART = re.compile(r"(.*)\.weight(?:\[(\d+):(\d+)\])?")


@dataclass(frozen=True, slots=True)
class Target:
    """A matrix of the program, `[end - begin, inputs]`: rows [begin, end) of a module.

    heads: number of heads whose rows are in GGUF's interleaved order; 0: rows are in order.
    """

    tensor: str
    inputs: int
    begin: int
    end: int
    heads: int = 0


def adapter_targets(
    checkpoint: Checkpoint, program: Program, *, permuted: bool = False
) -> Mapping[str, tuple[Target, ...]]:
    """The matrices of each module that adapters can change, by its Hugging Face name.

    A module is several matrices where the checkpoint fuses what the program splits. Modules whose
    input is permuted (GPTQ with act-order) are left out unless `permuted`: an adapter's A expects
    it in order.
    """
    gguf = checkpoint.format == "gguf"
    names = _hugging_face_names(checkpoint.architecture, program) if gguf else {}
    heads = _interleaved_heads(program) if gguf else {}
    out: dict[str, tuple[Target, ...]] = {}
    for op in program.ops:
        if not isinstance(op, Linear) or op.out.selected:
            continue
        if op.weight.tensor.order is not None and not permuted:
            continue
        tensor = op.weight.tensor.name
        if (match := _PART.fullmatch(tensor)) is None:
            continue
        stored, begin, end = match.groups()
        module = names.get(stored) if gguf else stored
        if module is not None:
            first = int(begin or 0)
            rows = first, int(end) if end else first + op.out.width
            target = Target(tensor, op.x.width, *rows, heads.get(stored.rpartition(".")[2], 0))
            out[module] = (*out.get(module, ()), target)
    return out


def _hugging_face_names(architecture: str, program: Program) -> dict[str, str]:
    """Hugging Face names of modules by their GGUF names."""
    own = HF_NAMES | NAMES.get(architecture, {})
    layers = range(len(program.cache))
    return {GGUF_NAMES[m].format(i): own[m].format(i) for m in MODULES for i in layers}


def _interleaved_heads(program: Program) -> dict[str, int]:
    """Numbers of heads of q and k if GGUF interleaves their rows, by the end of its name."""
    found = [op.heads for op in program.ops if isinstance(op, Rope) and op.interleaved][:2]
    return dict(zip(("attn_q", "attn_k"), found, strict=False))
