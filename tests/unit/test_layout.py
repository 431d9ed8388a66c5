"""The layout of packed weights has a version, and cannot change without another one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from octavo import _native
from octavo.checkpoint import TensorType
from octavo.checkpoint.base import GROUPED, PACKED
from octavo.checkpoint.grouped import WITH_MINIMUM

# What a file of the matrices below sums to, by `LAYOUT_VERSION` (native/runtime/pack.h). Files that
# were written before a change of layout must not be mapped after it: add a version, change none.
FILES = {
    3: "588982be5233b65dac9b8de37b646cfd7159bb90f4ab2ab12a7e27f6cef89739",
    4: "22a42f7d3597d40463c1c677f4d914f63cce9d22cc56a1a76408e88401941ed8",
}

ROWS, COLS, GROUP = 20, 512, 128
TWO_SCALES = (TensorType.Q4_1, TensorType.Q5_1, TensorType.Q4_K, TensorType.Q5_K)
# Where a block's fp16 scales lie, if not in front.
HALVES = {
    TensorType.Q2_K: (80, 82), TensorType.Q3_K: (108,), TensorType.Q6_K: (208,),
    TensorType.MXFP4: (),
} | dict.fromkeys(TWO_SCALES, (0, 2))  # fmt: skip


def stored(kind: TensorType) -> np.ndarray:
    """A matrix with every code, and scales whose products are exact on any machine."""
    if kind in GROUPED:
        codes = np.arange(ROWS * COLS) * 7 % (127 if kind is TensorType.FP8 else 256)
        if kind in (TensorType.INT4, TensorType.INT4_MIN, TensorType.TABLE4):
            codes %= 16
        numbers = [2.0 ** -(np.arange(ROWS * COLS // GROUP) % 5)]
        if kind in WITH_MINIMUM:
            numbers.append(-numbers[0] / 2)
        if kind is TensorType.TABLE4:
            numbers.append(np.arange(16) / 8.0)
        floats = np.concatenate(numbers).astype(np.float32)
        return np.concatenate([codes.astype(np.uint8), floats.view(np.uint8)])
    elements, size = kind.block
    if elements == 1:
        values = (np.arange(ROWS * COLS) % 251 - 100).astype(np.float32) / 64
        if kind is TensorType.BF16:
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype(np.float16 if kind is TensorType.F16 else np.float32).view(np.uint8)
    blocks = (np.arange(ROWS * COLS // elements * size) * 37 % 251).astype(np.uint8)
    blocks = blocks.reshape(-1, size)
    for at in HALVES.get(kind, (0,)):
        scales = 2.0 ** -(np.arange(len(blocks)) % 5)
        blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks.reshape(-1)


@pytest.mark.parametrize("isa", _native.isas())
def test_no_layout_changes_without_its_version(isa: str, tmp_path: Path) -> None:
    model = _native.Model(isa, 1, 1, 1, 16 << 20, 1 << 20)
    for kind in PACKED:
        model.add_matrix(int(kind), GROUP if kind in GROUPED else 0, stored(kind), ROWS, COLS)
    model.add_vector(np.arange(20, dtype=np.float32), 20)
    assert model.save_weights(str(tmp_path / "file"))
    digest = hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()
    assert FILES[_native.LAYOUT_VERSION] == digest
