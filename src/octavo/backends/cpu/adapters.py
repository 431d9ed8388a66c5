"""LoRA adapters that are loaded: by name, with the requests that use them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo import _native
from octavo.checkpoint import TensorType
from octavo.checkpoint.adapter import LowRank, read_adapter
from octavo.checkpoint.base import Checkpoint
from octavo.errors import OctavoError, RequestError
from octavo.models.adapters import Target, adapter_targets
from octavo.program import Program

MAX_ADAPTERS = 64
HUGE_PAGE = 2 << 20
Matrix = npt.NDArray[np.generic]
Bytes = npt.NDArray[np.uint8]


class Part(NamedTuple):
    """Factors for one matrix, as native code takes them. a: `[rank, inputs]`; b: panels of 16
    outputs, `[panels, rank, 16]`; both as bytes."""

    matrix: int
    type: int
    a: Bytes
    b: Bytes
    rank: int
    inputs: int
    outputs: int
    scale: float


@dataclass(slots=True)
class _Loaded:
    slot: int
    bytes: int
    serial: int  # a name that is loaded again is another adapter
    users: int = 0
    leaving: bool = False


def _parts(
    module: str, targets: tuple[Target, ...], factors: LowRank, matrices: dict[str, int]
) -> list[Part]:
    """Factors for each matrix of a module. Raises RequestError."""
    rank, inputs = factors.a.shape
    outputs, expected = factors.b.shape[0], (max(t.end for t in targets), targets[0].inputs)
    if (outputs, inputs) != expected:
        raise RequestError(
            f"the adapter is for weights of {outputs} x {inputs}; {module[:80]} has "
            f"{' x '.join(map(str, expected))}", "lora_path", "invalid_adapter",
        )  # fmt: skip
    wide = factors.a.type is not TensorType.BF16  # fp16 becomes fp32, which loses nothing
    for tensor in (factors.a, factors.b):
        if not np.isfinite(tensor.vector()).all():
            raise RequestError(
                f"the adapter's factors of {module[:80]} are not all finite numbers", "lora_path",
                "invalid_adapter",
            )  # fmt: skip
    a, b = (
        t.vector() if wide else t.raw().view(np.uint16).reshape(t.shape)
        for t in (factors.a, factors.b)
    )  # fmt: skip
    return [
        _part(matrices[t.tensor], t.heads, a, b[t.begin : t.end], factors.scale) for t in targets
    ]


def _part(matrix: int, heads: int, a: Matrix, b: Matrix, scale: float) -> Part:
    """Factors for one matrix. heads: of outputs in GGUF's interleaved order, or 0."""
    (rank, inputs), outputs = a.shape, b.shape[0]
    if heads:
        b = b.reshape(heads, 2, -1, rank).swapaxes(1, 2).reshape(outputs, rank)
    padded = np.zeros((-(-outputs // 16) * 16, rank), b.dtype)
    padded[:outputs] = b
    panels = padded.reshape(-1, 16, rank).swapaxes(1, 2)
    kind = TensorType.F32 if a.dtype == np.float32 else TensorType.BF16
    flat = [np.ascontiguousarray(x).view(np.uint8).reshape(-1) for x in (a, panels)]
    return Part(matrix, int(kind), flat[0], flat[1], rank, inputs, outputs, scale)


def _bytes(parts: list[Part]) -> int:
    """What the native code takes for them: A in panels of 16 rows and 64 columns, whole pages."""
    total = 0
    for p in parts:
        element = TensorType(p.type).block[1]
        total += -(-p.rank // 16) * 16 * -(-p.inputs // 64) * 64 * element + p.b.nbytes + 128
    return -(-total // HUGE_PAGE) * HUGE_PAGE


class LoadedAdapters:
    """The adapters of one native model. matrices: its matrices by tensor name. limit: bytes that
    adapters may take together."""

    def __init__(
        self, checkpoint: Checkpoint, program: Program, model: _native.Model,
        matrices: dict[str, int], limit: int,
    ) -> None:  # fmt: skip
        self.targets = adapter_targets(checkpoint, program)
        self._model = model
        self._matrices = matrices
        self._limit = limit
        self._serials = count(1)
        self._loaded: dict[str, _Loaded] = {}

    def load(self, name: str, path: Path) -> None:
        """Reads an adapter from a PEFT folder. Raises RequestError."""
        if name in self._loaded or len(self._loaded) >= MAX_ADAPTERS:
            why = "is loaded already" if name in self._loaded else f"is one over {MAX_ADAPTERS}"
            raise RequestError(f"adapter {name[:64]!r} {why}", "lora_name", "invalid_value")
        try:
            factors = read_adapter(path)
        except OctavoError as e:
            raise RequestError(str(e), "lora_path", "invalid_adapter") from None
        unknown = sorted(set(factors) - set(self.targets))
        if unknown:
            raise RequestError(
                f"the adapter changes {unknown[0][:80]!r}, which this model does not have, or "
                "which cannot be adapted", "lora_path", "invalid_adapter",
            )  # fmt: skip
        parts = [
            part
            for module, factor in factors.items()
            for part in _parts(module, self.targets[module], factor, self._matrices)
        ]
        size = _bytes(parts)
        used = sum(a.bytes for a in self._loaded.values())
        if used + size > self._limit:
            raise RequestError(
                f"adapter {name[:64]!r} takes {size >> 10:,} KiB and "
                f"{(self._limit - used) >> 10:,} KiB are left; start the server with a larger "
                "--lora-memory", "lora_path", "insufficient_memory",
            )  # fmt: skip
        slot = self._model.add_adapter(parts)
        self._loaded[name] = _Loaded(slot, size, next(self._serials))

    def unload(self, name: str) -> None:
        """Forgets an adapter, once the requests that use it have ended. Raises RequestError."""
        adapter = self._find(name)
        adapter.leaving = True
        self._sweep(name, adapter)

    def acquire(self, name: str) -> tuple[int, str]:
        """Its slot, and a key that sets its cached prefixes apart. Raises RequestError."""
        adapter = self._find(name)
        adapter.users += 1
        return adapter.slot, f"\0{name}\0{adapter.serial}"

    def release(self, name: str) -> None:
        adapter = self._loaded[name]
        adapter.users -= 1
        self._sweep(name, adapter)

    def _find(self, name: str) -> _Loaded:
        adapter = self._loaded.get(name)
        if adapter is None or adapter.leaving:
            raise RequestError(f"no adapter {name[:64]!r}", "adapter", "model_not_found")
        return adapter

    def _sweep(self, name: str, adapter: _Loaded) -> None:
        if adapter.leaving and not adapter.users:
            self._model.remove_adapter(adapter.slot)
            del self._loaded[name]
