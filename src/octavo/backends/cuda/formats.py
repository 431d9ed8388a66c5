"""What checkpoint tensors become on the device: one of five kinds of codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from octavo.backends.cuda.constants import TILE, up
from octavo.checkpoint import Tensor, TensorType
from octavo.checkpoint.base import FLOATS, GROUPED
from octavo.errors import Unsupported

Kind = Literal["bf16", "int4", "int8", "table4", "fp8"]
DType = Literal["bf16", "f16", "f32", "u8", "i32", "f64"]
BYTES: dict[DType, int] = {"bf16": 2, "f16": 2, "f32": 4, "u8": 1, "i32": 4, "f64": 8}


class Form(NamedTuple):
    """How a matrix is stored on the device. group: columns that share a scale, 0 for bf16. scale:
    the type of scales; fp16 where the checkpoint's are. minima: there is one beside each scale."""

    kind: Kind
    group: int = 0
    scale: DType = "f32"
    minima: bool = False


_T = TensorType
_FORMS: dict[TensorType, Form] = {
    _T.Q4_0: Form("int4", 32, "f16"),
    _T.Q4_1: Form("int4", 32, "f16", True),
    _T.Q5_0: Form("int8", 32, "f16"),
    _T.Q5_1: Form("int8", 32, "f16", True),
    _T.Q8_0: Form("int8", 32, "f16"),
    _T.Q2_K: Form("int4", 16, "f32", True),
    _T.Q3_K: Form("int4", 16),
    _T.Q4_K: Form("int4", 32, "f32", True),
    _T.Q5_K: Form("int8", 32, "f32", True),
    _T.Q6_K: Form("int8", 16),
    _T.IQ4_NL: Form("table4", 32, "f16"),
    _T.MXFP4: Form("table4", 32),
}
_GROUPED: dict[TensorType, tuple[Kind, bool]] = {
    _T.INT4: ("int4", False),
    _T.INT4_MIN: ("int4", True),
    _T.INT8: ("int8", False),
    _T.INT8_MIN: ("int8", True),
    _T.TABLE4: ("table4", False),
    _T.FP8: ("fp8", False),
}


def form_of(tensor: Tensor) -> Form:
    """The form of a matrix. Raises Unsupported."""
    if tensor.type in FLOATS:
        return Form("bf16")
    if tensor.type in GROUPED:
        kind, minima = _GROUPED[tensor.type]
        return Form(kind, tensor.group, "f32", minima)
    if tensor.type not in _FORMS:
        raise Unsupported(f"the CUDA backend does not read {tensor.type.name} matrices")
    return _FORMS[tensor.type]


class Array(NamedTuple):
    """Memory on the device."""

    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        count = 1
        for n in self.shape:
            count *= n
        return count * BYTES[self.dtype]


@dataclass(frozen=True)
class MatrixSpec:
    """Weights of one form: rows of several tensors one after the other, or, of experts, a matrix
    for each."""

    tensors: tuple[Tensor, ...]
    experts: bool = False

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(t.name for t in self.tensors)

    @property
    def form(self) -> Form:
        return form_of(self.tensors[0])

    @property
    def n(self) -> int:
        return self.tensors[0].shape[0] if self.experts else sum(t.shape[0] for t in self.tensors)

    @property
    def k(self) -> int:
        return self.tensors[0].shape[1]

    @property
    def stored(self) -> int:
        """Bytes in the file."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays of its `Matrix` by name, padded to tiles."""
        form, n, k = self.form, up(self.n), up(self.k)
        lead = (len(self.tensors),) if self.experts else ()
        if form.kind == "bf16":
            return {"codes": Array("bf16", (*lead, n, k))}
        width = TILE // 2 if form.kind in ("int4", "table4") else TILE
        scales = Array(form.scale, (*lead, -(-k // form.group), n))
        out = {"codes": Array("u8", (*lead, n // TILE, k // TILE, TILE, width)), "scales": scales}
        if form.minima:
            out["minima"] = scales
        if form.kind == "table4":
            out["table"] = Array("f32", (16,))
        return out

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())
