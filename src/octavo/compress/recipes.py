"""Recipes: which format each weight of a model gets, and by which method.

Those that come with Octavo lie in `builtin/`, in the form that a recipe of one's own has
(`recipe_file.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, get_args

from octavo.checkpoint.base import TensorType
from octavo.compress.grids import Scheme
from octavo.errors import UsageError

Layout = Literal["gptq", "awq", "compressed-tensors", "mlx", "safetensors"]
Method = Literal["rtn", "gptq", "healed", "distilled", "awq", "smoothquant"]
Activations = Literal["dynamic", "static"]
KvDtype = Literal["int8"]
Where = Literal["sensitive", "first-sixteenth", "shared"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
METHODS: tuple[Method, ...] = get_args(Method)
WHERE: tuple[Where, ...] = get_args(Where)


@dataclass(frozen=True, slots=True)
class Rule:
    """What tensors whose names fit one of the patterns become; None: they stay as they are.

    where: only those of layers that lose most by rounding, as llama.cpp's mixes have it. sensitive:
    the first and last eighth, and a third of the others; shared: with a quarter as many outputs as
    inputs or fewer, as of values that four queries share.
    """

    patterns: tuple[str, ...]
    becomes: Scheme | TensorType | None
    where: Where | None = None

    def fits(self, name: str, shape: tuple[int, ...] = (), layers: int = 0) -> bool:
        if not any(fnmatchcase(name, p) for p in self.patterns):
            return False
        if self.where is None:
            return True
        found = _LAYER.match(name)
        return found is not None and _MEANT[self.where](int(found[1]), layers, shape)


@dataclass(frozen=True, slots=True)
class GgufRecipe:
    """A GGUF file. base: the type of matrices that no rule is about; the first rule that fits is
    taken. The matrix that logits are made with is called "output.weight" here in any model."""

    name: str
    summary: str
    base: TensorType
    rules: tuple[Rule, ...]
    file_type: int  # as GGUF numbers them
    file: str = field(default="", compare=False, repr=False)  # of one's own

    def type_of(self, name: str, shape: tuple[int, ...], layers: int, tied: bool) -> TensorType:
        """The type of a tensor; tied: the embeddings are the head."""
        if len(shape) < 2 or not name.endswith(".weight") or name.endswith(_FLOATS):
            return TensorType.F32
        if name == "token_embd.weight" and tied:
            name = "output.weight"
        for rule in self.rules:
            if rule.fits(name, shape, layers):
                assert isinstance(rule.becomes, TensorType)
                return _fitting(rule.becomes, shape[-1])
        return _fitting(self.base, shape[-1])


# Routers, norms and tables that are added, which llama.cpp does not round either.
_FLOATS = ("ffn_gate_inp.weight", "_norm.weight", "position_embd.weight", "token_types.weight")
_LAYER = re.compile(r"blk\.(\d+)\.")
# What rows that are not whole blocks of 256 get instead, as in llama.cpp.
_NARROWER = {
    TensorType.Q4_K: TensorType.Q5_0, TensorType.Q5_K: TensorType.Q5_1,
    TensorType.Q6_K: TensorType.Q8_0, TensorType.Q2_K: TensorType.Q4_0,
    TensorType.Q3_K: TensorType.Q4_0,
}  # fmt: skip


# Whether layer i of n, with a matrix of that shape, is meant.
_MEANT: Mapping[Where, Callable[[int, int, tuple[int, ...]], bool]] = {
    "sensitive": lambda i, n, _: i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2,
    "first-sixteenth": lambda i, n, _: i < n // 16,
    "shared": lambda i, n, shape: 4 * shape[-2] <= shape[-1],
}


def _fitting(kind: TensorType, columns: int) -> TensorType:
    """The type itself, or the next one whose blocks divide the rows."""
    if columns % kind.block[0]:
        kind = _NARROWER.get(kind, kind)
    return TensorType.BF16 if columns % kind.block[0] else kind


@dataclass(frozen=True, slots=True)
class FolderRecipe:
    """A folder of safetensors whose linear layers are rounded; embeddings, norms, routers and the
    head stay as they are. weights: of layers that no rule is about, None for as they are; the first
    rule that fits is taken. activations: what readers of compressed-tensors do with inputs of
    layers. layouts: the first by default. vision: of the layers of what encodes images, which are
    rounded to the nearest, with inputs of as many bits, a scale a token. kv: what keys and values
    are cached as when the model is served."""

    name: str
    summary: str
    weights: Scheme | None
    layouts: tuple[Layout, ...]
    method: Method = "rtn"
    rules: tuple[Rule, ...] = ()
    activations: Activations | None = None
    vision: Scheme | None = None
    kv: KvDtype | None = None
    file: str = field(default="", compare=False, repr=False)  # of one's own

    def scheme_of(self, name: str) -> Scheme | None:
        """What a layer's weights become; None: they stay as they are."""
        for rule in self.rules:
            if rule.fits(name):
                assert not isinstance(rule.becomes, TensorType)
                return rule.becomes
        return self.weights

    @property
    def calibrated(self) -> bool:
        """True if the method looks at data."""
        return self.method != "rtn"


Recipe = GgufRecipe | FolderRecipe


def check_rules(recipe: Recipe, layers: Iterable[str], tensors: Iterable[str] = ()) -> None:
    """Raises UsageError if a rule of a recipe of one's own fits no layer; one that keeps layers may
    be about any tensor. In folders each pattern counts: those of GGUF files are for many families.
    """
    layers, tensors = set(layers), {*tensors, *layers}
    for rule in recipe.rules if recipe.file else ():
        names = tensors if rule.becomes is None else layers
        idle = [p for p in rule.patterns if not any(fnmatchcase(n, p) for n in names)]
        if idle and (isinstance(recipe, FolderRecipe) or len(idle) == len(rule.patterns)):
            like = f"; there is {min(layers)}" if layers else ""
            raise UsageError(f"{recipe.file}: no layer fits {idle[0]!r}{like}")
