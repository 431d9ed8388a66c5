"""Models from one format to another, exactly where the formats' grids coincide.

Every tensor is compared with what it was as it is written. One that the new format's grid cannot
hold becomes 16 bits.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from octavo.checkpoint.base import FLOATS, Checkpoint, TensorType, tensor_bytes
from octavo.checkpoint.dequantize import decoded
from octavo.checkpoint.places import check_new, check_new_file, check_outside
from octavo.checkpoint.progress import Advance, dropping_pages
from octavo.checkpoint.quantized import quantization_of
from octavo.checkpoint.writer import NewTensor, write_folder, write_gguf
from octavo.compress import layouts, repack
from octavo.compress.beside import beside
from octavo.compress.counterparts import Counterpart
from octavo.compress.fit import F32
from octavo.compress.folder_view import folder_parts
from octavo.compress.gguf_view import gguf_parts
from octavo.compress.grids import Grid, Quantized, check_finite
from octavo.compress.mmproj import build_convertible, mmproj_parts, text_only
from octavo.compress.packing import as_floats
from octavo.compress.recipes import Layout
from octavo.compress.writing import measured, module, named
from octavo.errors import UsageError
from octavo.models.vision import VisionModel

Format = Layout | Literal["gguf"]
_HALVES = {TensorType.F16: "float16", TensorType.BF16: "bfloat16"}
_FILE_TYPES = {  # as GGUF numbers files by most of their matrices
    TensorType.F32: 0, TensorType.F16: 1, TensorType.BF16: 32, TensorType.Q4_0: 2,
    TensorType.Q4_1: 3, TensorType.Q8_0: 7, TensorType.Q5_1: 9, TensorType.MXFP4: 38,
}  # fmt: skip
_WIDE = ("ffn_gate_inp.weight", "v.position_embd.weight")
AT_ONCE = 1 << 15  # numbers that are compared at a time, in fp64: what caches hold
_IN_A_LAYER = re.compile(r"\.\d+\.")
_QUANTIZATION = ("quantization_config", "quantization", "compression_config")


@dataclass(frozen=True, slots=True)
class Moved:
    """A tensor of the new model. was, now: how it is stored; error: the root of the mean squared
    difference as a share of that of the values; 0: no value has changed."""

    name: str
    was: str
    now: str
    error: float

    @property
    def lossless(self) -> bool:
        return self.error == 0


@dataclass(frozen=True, slots=True)
class Converted:
    """A model that was written in another format. mmproj: the file with its image encoder."""

    source: Path
    output: Path
    format: Format
    bytes_before: int
    bytes_after: int
    tensors: tuple[Moved, ...]
    mmproj: Path | None = None

    @property
    def lossless(self) -> bool:
        return all(t.lossless for t in self.tensors)


def format_of(checkpoint: Checkpoint) -> Format | str:
    """What a model is stored as. Raises Unsupported for a method that is not read."""
    if checkpoint.format == "gguf":
        return "gguf"
    found = quantization_of(checkpoint.metadata)
    return found[0] if found else "safetensors"


class Conversion:
    """A model and the format it is to have; nothing is written before `run`."""

    def __init__(self, checkpoint: Checkpoint, output: Path, format: Format) -> None:
        """Raises UsageError where the model has that format already, or has nothing that the format
        could hold; Unsupported for a model that the format cannot say; what `check_new`,
        `check_new_file` and `check_outside` do."""
        if format_of(checkpoint) == format:
            raise UsageError(f"{checkpoint.path.name} is {format} already")
        if (format == "gguf") != (output.suffix == ".gguf"):
            wanted = f"{output}.gguf" if format == "gguf" else str(output.with_suffix(""))
            kind = "file that ends with .gguf" if format == "gguf" else "folder"
            raise UsageError(f"{format} is a {kind}; {output} is none", f"--output {wanted}")
        (check_new_file if format == "gguf" else check_new)(output)
        check_outside(output, checkpoint.path)
        self._checkpoint, self._output, self._format = checkpoint, output, format
        self._progress: Advance = lambda _: None
        self._moved: list[Moved] = []
        self._tensors: dict[str, NewTensor] = {}
        self._images: dict[str, NewTensor] = {}
        self._shapes: dict[tuple[tuple[int, int], Grid], layouts.Tensors] = {}
        self.mmproj: Path | None = None  # where the image encoder goes, in a file of its own
        self._write = self._to_gguf() if format == "gguf" else self._to_folder(format)

    def run(self, progress: Advance = lambda _: None) -> Converted:
        """Writes the model, whole or not at all. Raises WriteError, UsageError for weights that are
        no numbers."""
        self._progress = dropping_pages(self._checkpoint, progress)
        self._moved.clear()
        self._write()
        written = {**self._tensors, **self._images}
        after = sum(tensor_bytes(t.type, t.shape, n) for n, t in written.items())
        before = self._checkpoint.nbytes
        return Converted(
            self._checkpoint.path, self._output, self._format, before, after, tuple(self._moved),
            self.mmproj,
        )  # fmt: skip

    def _to_gguf(self) -> Callable[[], None]:
        vision = build_convertible(self._checkpoint)
        source = self._checkpoint if vision is None else text_only(self._checkpoint)
        view, parts = gguf_parts(source)
        half, out = half_of(parts), self._tensors
        out.update({p.name: self._block(p) or self._gguf_floats(p, half) for p in parts})
        for name, tensor in view.tensors.items():  # factors of rotary embeddings
            if name not in out:
                out[name] = NewTensor(tensor.type, tensor.shape, tensor.raw)
        matrices = Counter(t.type for t in out.values() if len(t.shape) > 1)
        number = _FILE_TYPES.get(matrices.most_common(1)[0][0], 0)
        metadata = {**view.metadata, "general.file_type": number}
        write = self._to_mmproj(vision, half, number) if vision is not None else lambda: None

        def both() -> None:
            new = self.mmproj is not None and not self.mmproj.exists()
            write()
            try:
                write_gguf(self._output, metadata, out)
            except BaseException:  # whole or not at all, also where it is interrupted
                if self.mmproj is not None and new:
                    self.mmproj.unlink(missing_ok=True)
                raise

        return both

    def _to_mmproj(self, vision: VisionModel, half: TensorType, number: int) -> Callable[[], None]:
        """The image encoder, in a file beside."""
        metadata, parts = mmproj_parts(self._checkpoint, vision)
        self._images = {p.name: self._block(p) or self._gguf_floats(p, half) for p in parts}
        path = self._output.with_name(f"mmproj-{self._output.name}")
        check_new_file(path)
        self.mmproj = path
        return lambda: write_gguf(path, metadata | {"general.file_type": number}, self._images)

    def _gguf_floats(self, part: Counterpart, half: TensorType) -> NewTensor:
        """Vectors, routers and embeddings of images as F32, which is what llama.cpp reads."""
        convolution = part.name == "v.patch_embd.weight" and part.type is TensorType.BF16
        if len(part.shape) == 1 or convolution or part.name.endswith(_WIDE):
            return self._floats(part, TensorType.F32)
        return self._floats(part, part.type if part.type in FLOATS else half)

    def _block(self, part: Counterpart) -> NewTensor | None:
        """A matrix, or a layer's experts, as blocks that hold every value; None if none do."""
        if part.moved or len(part.shape) < 2:
            return None
        if part.type.value < 1000 and part.type.block[0] > 1:  # MXFP4, which folders have too
            return self._stacked(part, part.type, lambda i: _rows_of(part, i))
        grids = [repack.uniform(t) for t in part.sources]
        kinds = {repack.block_type(u) if u is not None else None for u in grids}
        kind = kinds.pop()
        if kinds or kind is None:
            return None

        def make(i: int) -> Any:
            u = repack.uniform(part.sources[i])
            assert u is not None and kind is not None
            return repack.blocks(u.picked(part.rows), kind)

        return self._stacked(part, kind, make)

    def _stacked(
        self, part: Counterpart, kind: TensorType, make: Callable[[int], Any]
    ) -> NewTensor:
        def read() -> Any:
            made = [make(i) for i in range(len(part.sources))]
            now = decoded(np.concatenate(made), kind).reshape(part.shape)
            self._compare(part, kind.name, now)
            return made[0] if len(made) == 1 else np.stack(made)

        return NewTensor(kind, part.shape, read)

    def _to_folder(self, format: Layout) -> Callable[[], None]:
        folder, parts = folder_parts(self._checkpoint)
        half, out = half_of(parts), self._tensors
        grids: dict[str, Grid] = {}
        for part in parts:
            held = None if format == "safetensors" else self._packed(part, format)
            if held is None:
                kind = part.type if part.type in FLOATS else half
                out[part.name] = self._floats(part, kind)
            else:
                stem = part.name.removesuffix(".weight")
                grids[stem], tensors = held
                out |= {f"{stem}.{ending}": t for ending, t in tensors.items()}
        if format != "safetensors" and not grids:
            raise UsageError(
                f"no layer of {self._checkpoint.path.name} lies on a grid that {format} holds "
                "exactly",
                f"octavo quantize {self._checkpoint.path} --recipe rtn-4 --format {format} "
                f"--output {self._output}",
            )
        config = plain_config(self._checkpoint, folder, half)
        if grids:
            kept = [p.name.removesuffix(".weight") for p in parts if len(p.shape) == 2]
            rest = sorted({"lm_head", *kept} - grids.keys())
            config |= layouts.config(format, grids, rest)
        return lambda: write_folder(self._output, config, out, beside(folder))

    def _packed(
        self, part: Counterpart, layout: Layout
    ) -> tuple[Grid, dict[str, NewTensor]] | None:
        """A matrix as a layout's tensors that hold every value; None if none do. Of what is not in
        a layer (embeddings, head) only MLX has codes."""
        if part.moved or not (layout == "mlx" or _IN_A_LAYER.search(part.name)):
            return None
        u = repack.uniform(part.sources[0])
        grid = repack.grid_of(u, layout) if u is not None else None
        if u is None or grid is None:
            return None
        try:
            shapes = self._measured((u.codes.shape[0], u.codes.shape[1]), layout, grid)
        except UsageError:  # words that are not whole
            return None

        def make() -> layouts.Tensors:
            u = repack.uniform(part.sources[0])
            assert u is not None and grid is not None
            tensors, now = repack.folder_tensors(u.picked(part.rows), layout, grid)
            self._compare(part, f"{layout} {grid.bits} bits, groups of {grid.group}", now)
            return tensors

        return grid, module(shapes, make)

    def _measured(self, shape: tuple[int, int], layout: Layout, grid: Grid) -> layouts.Tensors:
        """Types and shapes of a matrix's tensors, found by making one of zeros. Raises
        UsageError."""
        if (key := (shape, grid)) not in self._shapes:
            zeros = Quantized.zeros_of(shape, grid)
            self._shapes[key] = measured(layouts.integers(layout, zeros))
        return self._shapes[key]

    def _floats(self, part: Counterpart, kind: TensorType) -> NewTensor:
        def read() -> Any:
            x = part.values()
            with named(part.name):
                check_finite(x, kind)
            stored = as_floats(x, kind)
            self._compare(part, kind.name, _as_f32(stored, kind), x)
            return stored

        return NewTensor(kind, part.shape, read)

    def _compare(self, part: Counterpart, kind: str, now: F32, was: F32 | None = None) -> None:
        was = part.values() if was is None else was
        self._moved.append(Moved(part.name, part.type.name, kind, relative_error(was, now)))
        self._progress(sum(t.nbytes for t in part.sources))


def plain_config(source: Checkpoint, folder: Checkpoint, half: TensorType) -> dict[str, Any]:
    """A folder's config.json without a quantization; half: what its quantized weights become."""
    config = {k: v for k, v in folder.metadata.items() if k not in _QUANTIZATION}
    quantized = any(t.type not in FLOATS for t in source.tensors.values())
    if not quantized:
        return config
    config.pop("dtype", None)  # its newer name
    return config | {"torch_dtype": _HALVES[half]}


def half_of(parts: tuple[Counterpart, ...]) -> TensorType:
    """The 16 bits that a model's matrices have, BF16 where they have none."""
    floats = (p.type for p in parts if len(p.shape) > 1 and p.type in _HALVES)
    return next(floats, TensorType.BF16)


def relative_error(was: F32, now: F32) -> float:
    """The root of the mean squared difference as a share of that of the values; 0 only if all are
    equal."""
    if np.array_equal(was, now):
        return 0.0
    x, y, lost, whole = was.reshape(-1), now.reshape(-1), 0.0, 0.0
    for i in range(0, x.size, AT_ONCE):
        part = x[i : i + AT_ONCE].astype(np.float64)
        change = part - y[i : i + AT_ONCE]
        lost, whole = lost + float(change @ change), whole + float(part @ part)
    return max(math.sqrt(lost / max(whole, 1e-300)), float(np.finfo(np.float64).tiny))


def _as_f32(stored: Any, kind: TensorType) -> F32:
    if kind is TensorType.BF16:
        return np.asarray(stored.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(stored, np.float32)


def _rows_of(part: Counterpart, i: int) -> Any:
    """A source's blocks, `[rows, bytes a row]`."""
    tensor = part.sources[i]
    rows = tensor.raw().reshape(int(np.prod(tensor.shape[:-1])), -1)
    return rows if part.rows is None else rows[part.rows]
