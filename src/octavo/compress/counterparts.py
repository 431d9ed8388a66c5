"""The tensors of a GGUF file and of a Hugging Face folder that hold the same weights.

llama.cpp's converter lays rows of q and k in pairs, adds one to Gemma's norms, stacks experts, and
turns GPT-2's matrices upright. A counterpart does that, or undoes it, when it is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.base import FLOATS, Checkpoint, Computed, Tensor, TensorType, tensor_bytes
from octavo.checkpoint.dequantize import dequantize
from octavo.compress.fit import F32
from octavo.compress.packing import as_floats
from octavo.errors import Unsupported
from octavo.models.names import hf_names
from octavo.models.schemes import Scheme
from octavo.program import Attention, Program

Rows = npt.NDArray[np.int64]
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
# Tensors of GGUF files that config.json stands for.
_SETTINGS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Ends of names of what older folders hold and nothing is computed with: frequencies, causal masks.
_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


def in_order(tensor: Tensor) -> F32:
    """A tensor's values in fp32, its columns in the order of the layer's inputs."""
    x = dequantize(tensor)
    if tensor.order is None:
        return x
    out = np.empty_like(x)
    out[:, list(tensor.order)] = x
    return out


@dataclass(frozen=True)
class Counterpart:
    """A tensor to be written, and those that it is made of: one, or a layer's experts to stack.

    rows: the source's row that each row is; None where they are the same. added: to every element.
    transposed: whether one is `[inputs, outputs]` and the other `[outputs, inputs]`.
    """

    name: str
    sources: tuple[Tensor, ...]
    rows: Rows | None = None
    added: float = 0.0
    transposed: bool = False
    stacked: bool = False

    @property
    def type(self) -> TensorType:
        return self.sources[0].type

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.sources[0].shape
        if self.stacked:
            return (len(self.sources), *shape)
        return shape[::-1] if self.transposed else shape

    @property
    def moved(self) -> bool:
        """False if rows of the sources are rows of this one, one after the other."""
        return self.transposed or self.added != 0.0

    def values(self) -> F32:
        """In fp32."""
        parts = [self._values(t) for t in self.sources]
        return np.stack(parts) if self.stacked else parts[0]

    def _values(self, tensor: Tensor) -> F32:
        x = in_order(tensor)
        if self.added:
            x = x + np.float32(self.added)
        if self.rows is not None:
            x = x[self.rows]
        return x.T if self.transposed else x

    def tensor(self, kind: TensorType) -> Tensor:
        """What is read when it is needed; kind: of what is not stored as floats."""
        kind = self.type if self.type in FLOATS else kind
        stored = tensor_bytes(kind, self.shape, self.name)
        return Computed(self.name, kind, self.shape, stored, lambda: as_floats(self.values(), kind))


def of_folder(checkpoint: Checkpoint, program: Program, scheme: Scheme) -> Iterator[Counterpart]:
    """A folder's tensors, made of a GGUF file's. Raises Unsupported for one that none has."""
    modules = scheme.modules
    for name, tensor in checkpoint.tensors.items():
        if name in _SETTINGS:
            continue
        stem, _, kind = name.rpartition(".")
        layer = _LAYER.search(name)
        module = modules.get(_LAYER.sub("{}", stem))
        if module is None or kind not in ("weight", "bias"):
            raise _unknown(checkpoint, name, f"{scheme.model_type!r} folders")
        full = f"{module.format(layer[0] if layer else 0)}.{kind}"
        if "{}" in full:
            each = enumerate(tensor.part(e) for e in range(tensor.shape[0]))
            yield from (Counterpart(full.format(e), (part,)) for e, part in each)
        else:
            rows = _rows(stem, program, scheme, apart=True)
            found = Counterpart(full, (tensor,), rows, -_offset(scheme, full))
            yield replace(found, transposed=turned(scheme, full, tensor.shape))


def of_gguf(checkpoint: Checkpoint, program: Program, scheme: Scheme) -> Iterator[Counterpart]:
    """A GGUF file's tensors, made of a folder's. Raises Unsupported for one that none has."""
    names = {m: m for m in scheme.modules.values()}
    real = hf_names(names | {"embed": scheme.embed}, checkpoint.tensors).modules
    modules = {real[hf].replace("{{}}", "{}"): gguf for gguf, hf in scheme.modules.items()}
    head, embed = f"{real[scheme.modules['output']]}.weight", f"{real['embed']}.weight"
    tied = checkpoint.metadata.get("tie_word_embeddings", scheme.tied)
    experts: dict[str, list[tuple[int, Tensor]]] = {}
    for name, tensor in checkpoint.tensors.items():
        if name == head and tied and _same(tensor, checkpoint.tensors[embed]):
            continue
        if name.endswith(_BUFFERS):
            continue
        stem, _, kind = name.rpartition(".")
        numbers = _LAYER.findall(name)
        module = modules.get(_LAYER.sub("{}", stem))
        if module is None or kind not in ("weight", "bias"):
            raise _unknown(checkpoint, name, "GGUF files")
        full = f"{module.format(*numbers[:1])}.{kind}"
        if len(numbers) > 1:
            experts.setdefault(full, []).append((int(numbers[1]), tensor))
            continue
        rows = _rows(module, program, scheme, apart=False)
        found = Counterpart(full, (tensor,), rows, _offset(scheme, name))
        yield replace(found, transposed=turned(scheme, name, tensor.shape))
    for full, each in experts.items():
        each.sort(key=lambda pair: pair[0])
        yield Counterpart(full, tuple(t for _, t in each), stacked=True)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are stored alike: a folder may say that its head is its embedding, and
    hold another one, which is what is computed with."""
    return (a.type, a.shape) == (b.type, b.shape) and np.array_equal(a.raw(), b.raw())


def _unknown(checkpoint: Checkpoint, name: str, where: str) -> Unsupported:
    return Unsupported(
        f"{checkpoint.path.name}: {name[:64]!r} has no counterpart in {where}",
        "take the model in the other format from where it was published",
    )


def _rows(module: str, program: Program, scheme: Scheme, apart: bool) -> Rows | None:
    """The order of the rows of q and k. apart: from pairs to halves, else the other way."""
    attention = next(op for op in program.ops if isinstance(op, Attention))
    heads = {"attn_q": attention.heads, "attn_k": attention.kv_heads}.get(module.rpartition(".")[2])
    if not scheme.pairs or heads is None:
        return None
    width = attention.q.width // attention.heads
    index: npt.NDArray[Any] = np.arange(heads * width)
    shape = (heads, -1, 2) if apart else (heads, 2, width // 2)
    return index.reshape(shape).swapaxes(1, 2).reshape(-1)


def _offset(scheme: Scheme, name: str) -> float:
    """What GGUF's norms have more; name: the folder's."""
    return scheme.norm_offset if name.endswith("norm.weight") else 0.0


def turned(scheme: Scheme, name: str, shape: tuple[int, ...]) -> bool:
    """True for a matrix that folders hold as `[inputs, outputs]`; name: the folder's."""
    ends = bool(scheme.transposed) and name.endswith(scheme.transposed)
    return ends and len(shape) == 2
