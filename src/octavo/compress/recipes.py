"""Recipes that come with Octavo: which format each weight of a model gets."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from octavo.checkpoint.base import TensorType
from octavo.compress.grids import Grid
from octavo.errors import UsageError

Layout = Literal["gptq", "awq", "compressed-tensors", "mlx"]


@dataclass(frozen=True, slots=True)
class Finer:
    """Matrices of a layer that lose more than others by few bits. where: whether those of layer i
    of n, with so many outputs and inputs, are meant."""

    kind: TensorType
    matrices: tuple[str, ...]
    where: Callable[[int, int, tuple[int, ...]], bool]


@dataclass(frozen=True, slots=True)
class GgufRecipe:
    """A GGUF file. base: of most matrices; finer: of those that the first of these means, which
    llama.cpp's mixes of that name pick too; head: of the matrix that logits are made with."""

    name: str
    summary: str
    base: TensorType
    finer: tuple[Finer, ...]
    head: TensorType
    file_type: int  # as GGUF numbers them

    def type_of(self, name: str, shape: tuple[int, ...], layers: int, tied: bool) -> TensorType:
        """The type of a tensor; tied: the embeddings are the head."""
        if len(shape) < 2 or not name.endswith(".weight") or name.endswith(_FLOATS):
            return TensorType.F32
        if name == "output.weight" or (name == "token_embd.weight" and tied):
            return _fitting(self.head, shape[-1])
        if found := _LAYER.match(name):
            layer, matrix = int(found[1]), found[2]
            for finer in self.finer:
                if matrix in finer.matrices and finer.where(layer, layers, shape):
                    return _fitting(finer.kind, shape[-1])
        return _fitting(self.base, shape[-1])


# Routers, norms and tables that are added, which llama.cpp does not round either.
_FLOATS = ("ffn_gate_inp.weight", "_norm.weight", "position_embd.weight", "token_types.weight")
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
# What rows that are not whole blocks of 256 get instead, as in llama.cpp.
_NARROWER = {
    TensorType.Q4_K: TensorType.Q5_0, TensorType.Q5_K: TensorType.Q5_1,
    TensorType.Q6_K: TensorType.Q8_0, TensorType.Q2_K: TensorType.Q4_0,
    TensorType.Q3_K: TensorType.Q4_0,
}  # fmt: skip


def _fitting(kind: TensorType, columns: int) -> TensorType:
    """The type itself, or the next one whose blocks divide the rows."""
    if columns % kind.block[0]:
        kind = _NARROWER.get(kind, kind)
    return TensorType.BF16 if columns % kind.block[0] else kind


@dataclass(frozen=True, slots=True)
class FolderRecipe:
    """A folder of safetensors whose linear layers are rounded; embeddings, norms, routers and the
    head stay as they are. grid: None for e4m3 with a scale a row. layouts: the first by default."""

    name: str
    summary: str
    grid: Grid | None
    layouts: tuple[Layout, ...]


Recipe = GgufRecipe | FolderRecipe


_VALUES, _DOWN = ("attn_v",), ("ffn_down", "ffn_down_exps", "ffn_down_shexp")


def _finer(
    kind: str, matrices: tuple[str, ...],
    where: Callable[[int, int, tuple[int, ...]], bool] = lambda *_: True,
) -> Finer:  # fmt: skip
    return Finer(TensorType[kind], matrices, where)


def _often(i: int, n: int, _: tuple[int, ...]) -> bool:
    """A third of the layers, and the first and last eighth."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


_OFTEN_Q6_K = (_finer("Q6_K", _VALUES + _DOWN, _often),)
_Q3_K_M = (
    _finer("Q5_K", _VALUES, lambda i, n, shape: i < 2),
    _finer("Q5_K", _DOWN, lambda i, n, shape: i < n // 16),
    _finer("Q4_K", (*_VALUES, *_DOWN, "attn_output", "attn_qkv")),
)
_Q2_K = (  # values that four queries or more share are small
    _finer("Q4_K", _VALUES, lambda i, n, shape: 4 * shape[0] <= shape[1]),
    _finer("Q3_K", (*_VALUES, *_DOWN, "attn_output")),
)


def _gguf(
    name: str, base: str, finer: tuple[Finer, ...], head: str, file_type: int, summary: str
) -> GgufRecipe:
    return GgufRecipe(name, summary, TensorType[base], finer, TensorType[head], file_type)


RECIPES: dict[str, Recipe] = {
    r.name: r
    for r in (
        _gguf("q8_0", "Q8_0", (), "Q8_0", 7, "8.5 bits; hardly a loss"),
        _gguf("q6_k", "Q6_K", (), "Q6_K", 18, "6.6 bits"),
        _gguf("q5_k_m", "Q5_K", _OFTEN_Q6_K, "Q6_K", 17, "5.7 bits"),
        _gguf("q4_k_m", "Q4_K", _OFTEN_Q6_K, "Q6_K", 15, "4.8 bits; what most people run"),
        _gguf("q3_k_m", "Q3_K", _Q3_K_M, "Q6_K", 12, "3.9 bits; where memory is short"),
        _gguf("q2_k", "Q2_K", _Q2_K, "Q6_K", 10, "3 bits; for a model that does not fit otherwise"),
        _gguf("q4_0", "Q4_0", (), "Q6_K", 2, "4.5 bits; the least work for a CPU"),
        _gguf("q4_1", "Q4_1", (), "Q6_K", 3, "5 bits"),
        _gguf("iq4_nl", "IQ4_NL", (), "Q6_K", 25, "4.5 bits on an uneven grid"),
        FolderRecipe(
            "rtn-4", "4 bits in groups of 64, to the nearest", Grid(4, 64, False),
            ("gptq", "awq", "compressed-tensors", "mlx"),
        ),
        FolderRecipe(
            "rtn-8", "8 bits in groups of 64, to the nearest", Grid(8, 64, True),
            ("gptq", "compressed-tensors", "mlx"),
        ),
        FolderRecipe("fp8", "e4m3 with a scale a row", None, ("compressed-tensors",)),
    )
}  # fmt: skip


def find_recipe(name: str) -> Recipe:
    """A recipe by name. Raises UsageError."""
    if name not in RECIPES:
        raise UsageError(f"no recipe {name!r}; there are {', '.join(RECIPES)}", "--recipe q4_k_m")
    return RECIPES[name]
