"""From checkpoint tensors to packed weights on the device, one matrix after the other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from octavo.backends.cuda.constants import TILE
from octavo.backends.cuda.formats import Array, DType, MatrixSpec
from octavo.backends.cuda.launches import VectorRef
from octavo.backends.cuda.tensors import Matrix
from octavo.checkpoint import Tensor, TensorType
from octavo.checkpoint.dequantize import matrix_codes
from octavo.checkpoint.grouped import Codes, Grouped

ROWS = 4096  # of a float matrix that are converted at a time
TYPES: dict[DType, torch.dtype] = {
    "bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "u8": torch.uint8,
    "i32": torch.int32, "f64": torch.float64,
}  # fmt: skip


def allocate(array: Array, device: torch.device) -> torch.Tensor:
    """Memory for an array, zeroed."""
    return torch.zeros(array.shape, dtype=TYPES[array.dtype], device=device)


def pack(spec: MatrixSpec, device: torch.device) -> Matrix:
    """A matrix, or those of all experts, on the device."""
    form = spec.form
    arrays = {name: allocate(array, device) for name, array in spec.arrays.items()}
    if spec.experts:
        for e, tensor in enumerate(spec.tensors):
            _fill((tensor,), {n: a if n == "table" else a[e] for n, a in arrays.items()})
    else:
        _fill(spec.tensors, arrays)
    return Matrix(form.kind, spec.n, spec.k, form.group, **arrays)


def _fill(tensors: tuple[Tensor, ...], arrays: dict[str, torch.Tensor]) -> None:
    """Writes the rows of all tensors, one after the other."""
    if arrays.keys() == {"codes"}:  # floats
        at = 0
        for tensor in tensors:
            for begin in range(0, tensor.shape[0], ROWS):
                rows = _floats(tensor.rows(begin, min(begin + ROWS, tensor.shape[0])))
                arrays["codes"][at : at + len(rows), : rows.shape[1]] = rows
                at += len(rows)
        return
    found = [codes_of(tensor) for tensor in tensors]
    width = arrays["codes"].shape[1] * TILE
    codes = np.zeros((arrays["codes"].shape[0] * TILE, width), np.uint8)
    _stack(codes, [c.codes for c in found])
    nibbles = arrays["codes"].shape[-1] == TILE // 2
    arrays["codes"].copy_(torch.from_numpy(tiles(codes, nibbles)))
    for name in ("scales", "minima"):
        if name in arrays:
            parts = [part for c in found if (part := getattr(c, name)) is not None]
            numbers = np.zeros(arrays[name].shape[::-1], np.float32)
            _stack(numbers, parts)
            arrays[name].copy_(torch.from_numpy(pairs(numbers)))
    if "table" in arrays and found[0].table is not None:
        arrays["table"].copy_(torch.from_numpy(np.array(found[0].table, np.float32)))


def _stack(out: npt.NDArray[np.generic], parts: list[npt.NDArray[np.generic]]) -> None:
    at = 0
    for part in parts:
        out[at : at + len(part), : part.shape[1]] = part
        at += len(part)


def _floats(tensor: Tensor) -> torch.Tensor:
    """A float matrix in bf16, each value rounded once."""
    if tensor.type is TensorType.BF16:
        bits = np.ascontiguousarray(tensor.raw()).view(np.int16).reshape(tensor.shape)
        return torch.from_numpy(bits.copy()).view(torch.bfloat16)
    return torch.from_numpy(tensor.vector()).bfloat16()


def tiles(codes: npt.NDArray[np.uint8], nibbles: bool) -> npt.NDArray[np.uint8]:
    """Codes `[N, K]` as tiles of 64 x 64, each 32 columns after the other, in the order in which
    threads hold the first operand of `wgmma`; nibbles: two to a byte, 32 columns apart."""
    n, k = codes.shape
    square = codes.reshape(n // TILE, TILE, k // TILE, TILE).transpose(0, 2, 1, 3)
    low, high = square[..., : TILE // 2], square[..., TILE // 2 :]
    halves = (low | high << np.uint8(4))[None] if nibbles else np.stack([low, high])
    # rows: 16s, 8s, 1s; columns: 16s, 8s, pairs, 1s
    apart = halves.reshape(len(halves), n // TILE, k // TILE, TILE // 16, 2, 8, 2, 2, 4, 2)
    stored = apart.transpose(1, 2, 0, 3, 5, 8, 6, 7, 4, 9)
    return np.ascontiguousarray(stored).reshape(n // TILE, k // TILE, TILE, -1)


def pairs(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Scales `[N, groups]` as `[groups, N]`: of each 16 rows 0, 8, 1, 9, ...: a thread has two."""
    n, groups = numbers.shape
    apart = numbers.T.reshape(groups, n // 16, 2, 8).transpose(0, 1, 3, 2)
    return np.ascontiguousarray(apart).reshape(groups, n)


def codes_of(tensor: Tensor) -> Codes:
    """A quantized matrix as codes `[rows, columns]`, scales and minima `[rows, groups]`."""
    return tensor.read() if isinstance(tensor, Grouped) else matrix_codes(tensor)


def pack_vector(ref: VectorRef, array: Array, device: torch.device) -> torch.Tensor:
    """Vectors in fp32, with their offset."""
    values = [w.tensor.vector() + np.float32(w.offset) for w in ref.weights]
    found = torch.from_numpy(np.ascontiguousarray(np.concatenate(values), np.float32))
    return found.reshape(array.shape).to(device)
