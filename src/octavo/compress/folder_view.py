"""A GGUF file seen as the Hugging Face folder that it was made from."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import numpy as np

from octavo.checkpoint.base import Checkpoint, TensorType
from octavo.compress.counterparts import Counterpart, of_folder
from octavo.compress.hf_config import hf_config
from octavo.compress.tokenizer_files import tokenizer_files
from octavo.errors import Unsupported
from octavo.models import build_program
from octavo.models.schemes import SCHEMES, Scheme
from octavo.program import Attention, Op, Permute, Program, Value, Weight

_EXPERT = re.compile(r"\.experts\.(gate_up|down)_proj\.\d+$")  # as MXFP4's importer names them


def scheme_of(checkpoint: Checkpoint, program: Program) -> Scheme:
    """The family of a GGUF file. Raises Unsupported."""
    name = checkpoint.architecture
    windows = any(op.window for op in program.ops if isinstance(op, Attention))
    if name == "llama" and any(".ffn_gate_inp." in n for n in checkpoint.tensors):
        name = "mixtral"
    elif name == "llama" and windows:
        name = "mistral"
    elif name == "olmo2" and windows:
        name = "olmo3"
    if name not in SCHEMES:
        raise Unsupported(
            f"{checkpoint.path.name}: {name!r} files have no folder's form here",
            f"take the model's Hugging Face folder; built: {', '.join(SCHEMES)}",
        )
    return SCHEMES[name]


def as_folder(checkpoint: Checkpoint, kind: TensorType = TensorType.F32) -> Checkpoint:
    """The checkpoint as a Hugging Face folder; one that is a folder as it is.

    kind: F32, F16 or BF16, what block formats are read as (F32 holds them exactly; floats stay as
    they are stored). Raises Unsupported for a model that has no such folder, and what
    `build_program` does.
    """
    return checkpoint if checkpoint.format == "hf" else folder_parts(checkpoint, kind)[0]


def folder_parts(
    checkpoint: Checkpoint, kind: TensorType = TensorType.F32
) -> tuple[Checkpoint, tuple[Counterpart, ...]]:
    """See as_folder; also what each tensor is made of."""
    if checkpoint.format == "hf":
        if any(_EXPERT.search(name) for name in checkpoint.tensors):
            raise Unsupported(
                f"{checkpoint.path.name}: the experts of gpt-oss in MXFP4 have no form as floats",
                "use it as it is: 4 bits a weight is what it was trained with",
            )
        return checkpoint, tuple(Counterpart(n, (t,)) for n, t in checkpoint.tensors.items())
    program = build_program(checkpoint)
    scheme = scheme_of(checkpoint, program)
    parts = tuple(of_folder(checkpoint, program, scheme))
    tensors = {p.name: p.tensor(kind) for p in parts}
    held = next((t.type for t in tensors.values() if len(t.shape) == 2), kind)
    folder = replace(
        checkpoint, format="hf", metadata=hf_config(checkpoint, program, scheme, held),
        tensors=tensors, files=tokenizer_files(checkpoint),
    )  # fmt: skip
    check_same(checkpoint, program, build_program(folder))
    return folder, parts


def check_same(checkpoint: Checkpoint, ours: Program, theirs: Program) -> None:
    """Raises Unsupported if config.json cannot say what the GGUF file computes."""
    # inputs that are permuted for GPTQ's columns are in order where those are
    first, second = ([op for op in p.ops if not isinstance(op, Permute)] for p in (ours, theirs))
    same = len(first) == len(second) and ours.context == theirs.context
    for a, b in zip(first, second, strict=False):
        difference = type(a).__name__ if type(a) is not type(b) else _difference(a, b)
        if difference:
            raise Unsupported(
                f"{checkpoint.path.name}: a config.json cannot say its {difference}",
                "take the model's Hugging Face folder",
            )
    if not same:
        raise Unsupported(
            f"{checkpoint.path.name}: its folder would compute something else",
            "take the model's Hugging Face folder",
        )


def _difference(a: Op, b: Op) -> str:
    """The first parameter of an operation that differs, "" if none does. Weights have other names,
    and rows of q and k another order."""
    for field in fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        weights = isinstance(x, Weight | Value) or (
            isinstance(x, tuple) and x[:1] and not isinstance(x[0], float)
        )
        if weights or field.name == "interleaved":
            continue
        if isinstance(x, float | tuple):
            equal = np.shape(x) == np.shape(y) and np.allclose(x, y, rtol=1e-6, atol=0)
        else:
            equal = x == y
        if not equal:
            return f"{type(a).__name__}.{field.name} ({str(x)[:30]}, {str(y)[:30]})"
    return ""
