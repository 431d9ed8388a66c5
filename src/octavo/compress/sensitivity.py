"""What a model loses when one of its matrices is rounded: measured, kept, and used again."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np

from octavo import __version__
from octavo.backends import get_backend
from octavo.backends.base import Floats, Ints
from octavo.checkpoint.base import Checkpoint, Computed, Stored, Tensor, TensorType, tensor_bytes
from octavo.checkpoint.cache import cache_folder, writing
from octavo.checkpoint.dequantize import dequantize
from octavo.checkpoint.files import map_file, read_json
from octavo.checkpoint.writer import replacing
from octavo.compress.blocks import encode
from octavo.compress.clipping import range_quantize
from octavo.compress.distributions import Scorer, divergence
from octavo.compress.evaluation import fingerprint
from octavo.compress.grids import CHUNK, Grid, check_finite
from octavo.compress.writing import named
from octavo.engine.open import OpenModel
from octavo.errors import CheckpointError, WrittenByAnother
from octavo.models import build_program

T = TensorType
WIDE = (T.Q4_K, T.Q5_K, T.Q6_K, T.Q8_0)  # of rows of whole blocks of 256
NARROW = (T.IQ4_NL, T.Q5_0, T.Q8_0)  # of others
ROUGH = Grid(4, 32)  # that matrices are measured with: made in no time, and errors as of 4 bits
ROWS = 16  # of a matrix that errors of types are compared on
MAX_KEPT = 16 << 20  # bytes of a file of sensitivities


@dataclass(frozen=True)
class Option:
    """A type that a matrix can have: its bytes, and the KL that the model loses by it alone."""

    type: TensorType
    nbytes: int
    kl: float


def matrices(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The weights of a GGUF file that can be rounded further, by name."""
    return {n: t for n, t in checkpoint.tensors.items() if types_of(t)}


def types_of(tensor: Tensor) -> tuple[TensorType, ...]:
    """Types that take fewer bytes than the tensor does, the smallest first."""
    floats = ("_norm.weight", "ffn_gate_inp.weight", "position_embd.weight", "token_types.weight")
    if len(tensor.shape) < 2 or not tensor.name.endswith(".weight"):
        return ()
    if tensor.name.endswith(floats) or tensor.shape[-1] % 32:
        return ()
    ladder = NARROW if tensor.shape[-1] % 256 else WIDE
    return tuple(k for k in ladder if tensor_bytes(k, tensor.shape, tensor.name) < tensor.nbytes)


class Encoded:
    """Matrices in other types, each made once, in a folder that a later run goes on with."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, tensor: Tensor, kind: TensorType) -> Stored:
        """A matrix in a type. Raises WriteError, and UsageError for weights that are no numbers."""
        key = sha256(tensor.name.encode()).hexdigest()[:16]
        path = self._folder / f"{key}.{kind.name}"
        if not path.exists():
            x = dequantize(tensor)
            with named(tensor.name):
                made = encode(x.reshape(-1, x.shape[-1]), kind)
            with replacing(path) as file:
                file.write(made.data)
        return Stored(tensor.name, kind, tensor.shape, map_file(path), 0)

    def mixed(self, checkpoint: Checkpoint, kinds: Mapping[str, TensorType]) -> Checkpoint:
        """The checkpoint with some matrices in other types."""
        changed = {n: self.get(checkpoint.tensors[n], k) for n, k in kinds.items()}
        return replace(checkpoint, tensors={**checkpoint.tensors, **changed})


def opened(checkpoint: Checkpoint) -> OpenModel:
    return OpenModel(checkpoint, get_backend().compile(build_program(checkpoint)))


@dataclass(frozen=True)
class ReferenceLogits:
    """The model itself on some text: logits of every token predicted, by block."""

    blocks: Ints
    logits: list[Floats]
    rows: int
    threads: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, blocks: Ints, rows: int, threads: int) -> ReferenceLogits:
        scorer = Scorer(opened(checkpoint), rows, blocks.shape[1], threads)
        return cls(blocks, [scorer.whole(block) for block in blocks], rows, threads)

    def kl(self, checkpoint: Checkpoint) -> float:
        """Mean KL of a changed model from this one."""
        scorer = Scorer(opened(checkpoint), self.rows, self.blocks.shape[1], self.threads)
        found = [
            divergence(scorer.whole(block), q, block[1:])[2].mean()
            for block, q in zip(self.blocks, self.logits, strict=True)
        ]
        return float(np.mean(found))


def sensitivities(
    checkpoint: Checkpoint, blocks: Ints, rows: int, threads: int,
    progress: Callable[[int], object] = lambda _: None,
) -> dict[str, float]:  # fmt: skip
    """The KL of the model with each of its matrices alone on a grid of four bits.

    What is found is kept in the cache after every matrix, so that a later search need not measure
    it again. progress: told of every matrix. Raises CacheError.
    """
    found = _read(file := _file(checkpoint, blocks))
    reference: ReferenceLogits | None = None
    for name, tensor in matrices(checkpoint).items():
        if name not in found:
            reference = reference or ReferenceLogits.of(checkpoint, blocks, rows, threads)
            changed = {**checkpoint.tensors, name: _rough(tensor)}
            found[name] = reference.kl(replace(checkpoint, tensors=changed))
            _keep(file, found)
        progress(1)
    return found


def _rough(tensor: Tensor) -> Tensor:
    """A matrix rounded to `ROUGH`, in fp32."""

    def read() -> Floats:
        out = np.array(dequantize(tensor))
        with named(tensor.name):
            check_finite(out)
        rows = out.reshape(-1, out.shape[-1])
        at_once = max(1, CHUNK // rows.shape[1])
        for i in range(0, len(rows), at_once):
            rows[i : i + at_once] = range_quantize(rows[i : i + at_once], ROUGH)
        return out

    stored = tensor_bytes(T.F32, tensor.shape, tensor.name)
    return Computed(tensor.name, T.F32, tensor.shape, stored, read)


def options(tensor: Tensor, kl: float) -> list[Option]:
    """What a matrix can become, the smallest first and itself last.

    kl: as `sensitivities` finds it. Types lose in proportion to their mean square errors, as KL is
    quadratic in small changes of weights.
    """
    rows = dequantize(tensor).reshape(-1, tensor.shape[-1])
    sample = rows[np.linspace(0, len(rows) - 1, min(ROWS, len(rows))).astype(int)]
    measured = _mean_square(range_quantize(sample, ROUGH) - sample) or 1.0
    out = [
        Option(k, tensor_bytes(k, tensor.shape, tensor.name), kl * _error(sample, k) / measured)
        for k in types_of(tensor)
    ]
    return [*out, Option(tensor.type, tensor.nbytes, 0.0)]


def _mean_square(x: Floats) -> float:
    return float((x.astype(np.float64) ** 2).mean())


def _error(x: Floats, kind: TensorType) -> float:
    made = encode(x, kind)
    back = dequantize(Computed("sample", kind, x.shape, made.nbytes, lambda: made))
    return _mean_square(back - x)


# -- what is kept -------------------------------------------------------------------------------


def made_of(checkpoint: Checkpoint) -> str:
    """What encoded matrices and their losses depend on: the model, Octavo, how it measures."""
    return sha256(f"{fingerprint(checkpoint)} {__version__} {ROUGH}".encode()).hexdigest()


def _file(checkpoint: Checkpoint, blocks: Ints) -> Path:
    key = sha256(made_of(checkpoint).encode() + blocks.tobytes()).hexdigest()[:24]
    return cache_folder() / "sensitivity" / f"{key}.json"


def _read(file: Path) -> dict[str, float]:
    if not os.path.exists(file):
        return {}
    try:
        return msgspec.convert(read_json(file, MAX_KEPT), dict[str, float])
    except (CheckpointError, msgspec.ValidationError):
        return {}


def _keep(file: Path, found: dict[str, float]) -> None:
    """Another run of the same model keeps the same figures, and may be about to."""
    with suppress(WrittenByAnother), writing(file.parent), replacing(file) as out:
        out.write(msgspec.json.encode(found))
