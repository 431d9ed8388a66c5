"""A GGUF file seen as the Hugging Face folder that it was made from.

What llama.cpp's converter does to weights is undone as they are read: rows of q and k that lie in
pairs, norms plus one, experts in one tensor, matrices of GPT-2 turned upright.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from octavo.checkpoint.base import FLOATS, Checkpoint, Computed, Tensor, TensorType, tensor_bytes
from octavo.checkpoint.dequantize import dequantize
from octavo.compress.fit import F32
from octavo.compress.hf_config import hf_config
from octavo.compress.packing import as_floats
from octavo.compress.tokenizer_files import tokenizer_files
from octavo.errors import Unsupported
from octavo.models import build_program
from octavo.models.schemes import SCHEMES, Scheme
from octavo.program import Attention, Op, Program, Rope, Value, Weight

_LAYER = re.compile(r"blk\.(\d+)\.")
# Tensors of GGUF files that config.json stands for.
_SETTINGS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True, slots=True)
class Counterpart:
    """A tensor of a folder and the one of a GGUF file that holds the same.

    heads: of rows that GGUF holds as pairs. added: what GGUF has more. transposed: whether the
    folder holds `[inputs, outputs]`.
    """

    name: str
    source: Tensor
    heads: int = 0
    added: float = 0.0
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """In the folder."""
        return self.source.shape[::-1] if self.transposed else self.source.shape

    @property
    def rows(self) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """The row of the GGUF tensor that each of the folder's is; None where they are the same."""
        if not self.heads:
            return None
        return np.arange(self.source.shape[0]).reshape(self.heads, -1, 2).swapaxes(1, 2).reshape(-1)

    def values(self) -> F32:
        """The folder's tensor in fp32."""
        x = dequantize(self.source)
        if self.added:
            x = x - np.float32(self.added)
        if (rows := self.rows) is not None:
            x = x[rows]
        return x.T if self.transposed else x

    def tensor(self, kind: TensorType) -> Tensor:
        """The folder's tensor, read when it is needed; kind: of what is not stored as floats."""
        kind = self.source.type if self.source.type in FLOATS else kind
        stored = tensor_bytes(kind, self.shape, self.name)
        return Computed(self.name, kind, self.shape, stored, lambda: as_floats(self.values(), kind))


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


def counterparts(checkpoint: Checkpoint, program: Program, scheme: Scheme) -> Iterator[Counterpart]:
    """The tensors of the folder. Raises Unsupported for a tensor that none of them is."""
    modules = scheme.modules
    heads = _paired_heads(program)
    for name, tensor in checkpoint.tensors.items():
        if name in _SETTINGS:
            continue
        stem, _, kind = name.rpartition(".")
        layer = _LAYER.match(name)
        module = modules.get(_LAYER.sub("blk.{}.", stem))
        if module is None or kind not in ("weight", "bias"):
            raise Unsupported(
                f"{checkpoint.path.name}: {name[:64]!r} has no counterpart in "
                f"{scheme.model_type!r} folders",
                "take the model's Hugging Face folder",
            )
        full = f"{module.format(layer[1] if layer else 0)}.{kind}"
        if "{}" in full:
            for e in range(tensor.shape[0]):
                yield Counterpart(full.format(e), tensor.part(e))
            continue
        added = scheme.norm_offset if module.endswith("norm") and kind == "weight" else 0.0
        upside = full.endswith(scheme.transposed) if scheme.transposed else False
        pairs = heads.get(stem.rpartition(".")[2], 0)
        yield Counterpart(full, tensor, pairs, added, upside and len(tensor.shape) == 2)


def _paired_heads(program: Program) -> dict[str, int]:
    """Numbers of heads of q and k if GGUF holds their rows in pairs."""
    if not any(op.interleaved for op in program.ops if isinstance(op, Rope)):
        return {}
    attention = next(op for op in program.ops if isinstance(op, Attention))
    return {"attn_q": attention.heads, "attn_k": attention.kv_heads}


def as_folder(checkpoint: Checkpoint, kind: TensorType = TensorType.F32) -> Checkpoint:
    """The checkpoint as a Hugging Face folder; one that is a folder as it is.

    kind: F32, F16 or BF16, what block formats are read as (F32 holds them exactly; floats stay as
    they are stored). Raises Unsupported for a model that has no such folder, and what
    `build_program` does.
    """
    if checkpoint.format == "hf":
        return checkpoint
    program = build_program(checkpoint)
    scheme = scheme_of(checkpoint, program)
    tensors = {c.name: c.tensor(kind) for c in counterparts(checkpoint, program, scheme)}
    held = next((t.type for t in tensors.values() if len(t.shape) == 2), kind)
    folder = replace(
        checkpoint, format="hf", metadata=hf_config(checkpoint, program, scheme, held),
        tensors=tensors, files=tokenizer_files(checkpoint),
    )  # fmt: skip
    _check_same(checkpoint, program, build_program(folder))
    return folder


def _check_same(checkpoint: Checkpoint, ours: Program, theirs: Program) -> None:
    """Raises Unsupported if config.json cannot say what the GGUF file computes."""
    same = len(ours.ops) == len(theirs.ops) and ours.context == theirs.context
    for a, b in zip(ours.ops, theirs.ops, strict=False):
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
