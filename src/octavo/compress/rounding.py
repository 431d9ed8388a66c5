"""Models rounded without data: reads a tensor, rounds it, writes it, and goes on to the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from octavo.checkpoint.base import Checkpoint, Stored, Tensor, TensorType, tensor_bytes
from octavo.checkpoint.dequantize import dequantize
from octavo.checkpoint.progress import Advance
from octavo.checkpoint.quantized import quantization_of
from octavo.checkpoint.writer import NewTensor, write_folder, write_gguf
from octavo.compress import layouts
from octavo.compress.blocks import ENCODED, encode
from octavo.compress.fit import F32
from octavo.compress.grids import (
    Grid,
    check_finite,
    float8,
    largest_group,
    quantize,
    quantize_affine,
    rounded,
)
from octavo.compress.recipes import FolderRecipe, GgufRecipe, Layout, Recipe
from octavo.errors import UsageError
from octavo.models import build_program
from octavo.program import Experts, Linear, Route, Weight


@dataclass(frozen=True)
class Rounded:
    """What a model becomes. kinds: tensors by what they are stored as; weights: how many numbers;
    group: columns that share a scale, where a folder's layers have them; kept: layers left as they
    are, because no group divides them or they are stored stacked or transposed."""

    source: Path
    output: Path
    kinds: Mapping[str, int]
    weights: int
    bytes_before: int
    bytes_after: int
    group: int = 0
    kept: tuple[str, ...] = ()

    @property
    def bits(self) -> float:
        """Bits a weight, scales and what is not rounded included."""
        return 8 * self.bytes_after / max(1, self.weights)


@dataclass(frozen=True)
class Job:
    """A model and a recipe that fit together: says what would come of it, and does it."""

    checkpoint: Checkpoint
    recipe: Recipe
    output: Path
    layout: Layout | None = None

    def __post_init__(self) -> None:
        """Raises UsageError where the recipe is for models of another kind."""
        recipe, name = self.recipe, self.checkpoint.path.name
        if isinstance(recipe, GgufRecipe):
            if self.checkpoint.format != "gguf":
                raise UsageError(
                    f"{recipe.name} makes GGUF files of GGUF files; {name} is a folder",
                    "--recipe rtn-4",
                )
            if self.layout is not None:
                raise UsageError(f"{recipe.name} has no --format: it is a GGUF file")
            if self.output.suffix != ".gguf":
                raise UsageError(
                    f"{self.output} does not end with .gguf", f"--output {self.output}.gguf"
                )
            return
        if self.checkpoint.format != "hf":
            raise UsageError(
                f"{recipe.name} makes folders of folders; {name} is a GGUF file", "--recipe q4_k_m"
            )
        if self.layout is not None and self.layout not in recipe.layouts:
            raise UsageError(
                f"{recipe.name} is not stored as {self.layout}; {', '.join(recipe.layouts)} are",
                f"--format {recipe.layouts[0]}",
            )
        if quantization_of(self.checkpoint.metadata) is not None:
            raise UsageError(f"{name} is quantized already; take the model it was made from")
        if self.output.suffix in (".gguf", ".safetensors"):
            raise UsageError(f"{self.output} is no name for a folder", "--output model-4bit")
        if not self.linear:
            raise UsageError(f"the layers of {name} lie transposed or stacked; none can be rounded")

    # -- what would come of it ----------------------------------------------------------------

    @cached_property
    def types(self) -> dict[str, TensorType]:
        """Of a GGUF file: the type that each tensor gets."""
        assert isinstance(self.recipe, GgufRecipe)
        tensors, architecture = self.checkpoint.tensors, self.checkpoint.architecture
        layers = int(self.checkpoint.metadata.get(f"{architecture}.block_count", 0))
        tied = "output.weight" not in tensors
        return {n: self.recipe.type_of(n, t.shape, layers, tied) for n, t in tensors.items()}

    @cached_property
    def layers(self) -> dict[str, Tensor]:
        """Of a folder: the weights of linear layers and experts, without routers and the head, by
        the names they are stored under."""
        program = build_program(self.checkpoint)
        routers = {op.x for op in program.ops if isinstance(op, Route)}
        weights: list[Weight] = []
        for op in program.ops:
            if isinstance(op, Linear) and not op.out.selected and op.out != program.output:
                weights += [] if op.out in routers else [op.weight]
            elif isinstance(op, Experts):
                weights += op.gate + op.up + op.down
        return {w.tensor.name.partition("[")[0]: w.tensor for w in weights}

    @cached_property
    def linear(self) -> dict[str, Tensor]:
        """Those of `layers` that lie in the file as matrices of `[outputs, inputs]`."""
        stored = self.checkpoint.tensors
        upright = {n for n, t in self.layers.items() if isinstance(t, Stored) and n in stored}
        return {n: stored[n] for n in sorted(upright) if len(stored[n].shape) == 2}

    @cached_property
    def grid(self) -> Grid | None:
        """The recipe's, in the largest group that divides every layer that 32 columns divide."""
        assert isinstance(self.recipe, FolderRecipe)
        grid = self.recipe.grid
        if grid is None:
            return None
        fits = [g for t in self.linear.values() if (g := largest_group(t.shape[1], grid.group))]
        if not fits:
            raise UsageError("no group of 32 columns or more divides a layer of this model")
        return replace(grid, group=min(fits))

    @property
    def stored_as(self) -> Layout:
        assert isinstance(self.recipe, FolderRecipe)
        return self.layout or self.recipe.layouts[0]

    def _divides(self, t: Tensor) -> bool:
        return self.grid is None or t.shape[1] % self.grid.group == 0 and t.shape[0] % 32 == 0

    def forecast(self) -> Rounded:
        """The result without its making: sizes are exact but for headers."""
        if isinstance(self.recipe, GgufRecipe):
            tensors = self.checkpoint.tensors
            after = sum(tensor_bytes(k, tensors[n].shape, n) for n, k in self.types.items())
            return self._result(Counter(k.name for k in self.types.values()), after)
        kinds, after = Counter[str](), 0
        for name, t in self.checkpoint.tensors.items():
            if name in self.linear and self._divides(t):
                kinds[self.stored_as] += 1
                parts = self._parts(t.shape)
                after += sum(tensor_bytes(p.type, p.shape, name) for p in parts.values())
            else:
                kinds[t.type.name] += 1
                after += t.nbytes
        return self._result(kinds, after)

    def _result(self, kinds: Mapping[str, int], after: int) -> Rounded:
        tensors = self.checkpoint.tensors
        kept: tuple[str, ...] = ()
        if isinstance(self.recipe, FolderRecipe):
            done = {n for n, t in self.linear.items() if self._divides(t)}
            kept = tuple(sorted(self.layers.keys() - done))
        weights = sum(int(np.prod(t.shape)) for t in tensors.values())
        before = self.checkpoint.nbytes
        group = self.grid.group if isinstance(self.recipe, FolderRecipe) and self.grid else 0
        return Rounded(
            self.checkpoint.path, self.output, dict(kinds), weights, before, after, group, kept
        )

    # -- doing it -----------------------------------------------------------------------------

    def run(self, progress: Advance = lambda _: None) -> Rounded:
        """Writes the model. Raises WriteError, and UsageError for weights that are no numbers."""
        if isinstance(self.recipe, GgufRecipe):
            self._write_gguf(progress)
        else:
            self._write_folder(progress)
        return self.forecast()

    def _write_gguf(self, progress: Advance) -> None:
        assert isinstance(self.recipe, GgufRecipe)
        metadata = dict(self.checkpoint.metadata)
        metadata["general.file_type"] = self.recipe.file_type
        metadata["general.quantization_version"] = 2
        for key in [k for k in metadata if k.startswith(("split.", "general.alignment"))]:
            del metadata[key]
        tensors = {
            n: NewTensor(self.types[n], t.shape, _reader(t, self.types[n], progress))
            for n, t in self.checkpoint.tensors.items()
        }
        write_gguf(self.output, metadata, tensors)

    def _write_folder(self, progress: Advance) -> None:
        out: dict[str, NewTensor] = {}
        for name, t in self.checkpoint.tensors.items():
            if name in self.linear and self._divides(t):
                module = name.removesuffix(".weight")
                made = _Once(t, self._round, progress)
                for ending, part in self._parts(t.shape).items():
                    out[f"{module}.{ending}"] = replace(part, data=made.part(ending))
            else:
                out[name] = NewTensor(t.type, t.shape, _told(t, progress))
        config = dict(self.checkpoint.metadata) | self._config()
        write_folder(self.output, config, out, _beside(self.checkpoint.path))

    def _parts(self, shape: tuple[int, ...]) -> layouts.Tensors:
        """Types and shapes of what a layer of that shape becomes, found by making one of zeros."""
        rows, columns = shape
        key = rows, columns
        if key not in self._shapes:
            made = layouts.zeros(self.stored_as, self.grid, key)
            self._shapes[key] = {n: replace(t, data=_nothing) for n, t in made.items()}
        return self._shapes[key]

    @cached_property
    def _shapes(self) -> dict[tuple[int, int], layouts.Tensors]:
        return {}

    def _round(self, x: F32) -> layouts.Tensors:
        grid, layout = self.grid, self.stored_as
        if grid is None:
            return layouts.float_quantized(float8(x, "row"))
        if layout == "mlx":
            return layouts.mlx(quantize_affine(x, grid), (x.shape[0], x.shape[1]), grid)
        return layouts.integers(layout, quantize(x, grid))

    def _config(self) -> dict[str, Any]:
        done = {n for n, t in self.linear.items() if self._divides(t)}
        others = [n for n, t in self.checkpoint.tensors.items() if len(t.shape) == 2]
        kept = [
            n.removesuffix(".weight") for n in others if n.endswith(".weight") and n not in done
        ]
        return layouts.config(self.stored_as, self.grid, sorted({"lm_head", *kept}))


_WRITTEN = {"config.json", "model.safetensors.index.json", "quantize_config.json", "quality.json"}
_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".onnx", ".h5", ".msgpack", ".ot")
LARGEST_COPY = 64 << 20  # bytes: tokenizers are smaller, forgotten weights are not


def _beside(folder: Path) -> dict[str, Path]:
    """What lies in a model's folder and the folders in it but its weights: tokenizer, template,
    pooling."""
    out = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in name.parts)
        wanted = path.is_file() and path.suffix not in _WEIGHTS and str(name) not in _WRITTEN
        if path.suffix == ".safetensors" and len(name.parts) > 1:
            wanted = path.is_file()  # a module's own, such as a Dense layer's
        if wanted and not hidden and path.stat().st_size <= LARGEST_COPY:
            out[str(name)] = path
    return out


def _nothing() -> Any:
    raise AssertionError("a tensor that is only measured has no data")


class _Once:
    """A layer that is rounded when its first part is asked for, and let go of with its last."""

    def __init__(
        self, tensor: Tensor, make: Callable[[F32], layouts.Tensors], progress: Advance
    ) -> None:
        self._tensor, self._make, self._progress = tensor, make, progress
        self._made: dict[str, NewTensor] = {}
        self._begun = False

    def part(self, name: str) -> Callable[[], Any]:
        def read() -> Any:
            if not self._begun:
                self._begun = True
                with _named(self._tensor):
                    self._made = dict(self._make(dequantize(self._tensor)))
                self._progress(self._tensor.nbytes)
            return self._made.pop(name).data()

        return read


def _told(tensor: Tensor, progress: Advance) -> Callable[[], Any]:
    """The stored bytes."""

    def read() -> Any:
        progress(tensor.nbytes)
        return tensor.raw()

    return read


def _reader(tensor: Tensor, kind: TensorType, progress: Advance) -> Callable[[], Any]:
    """The bytes of a tensor in another type."""

    def read() -> Any:
        progress(tensor.nbytes)
        if tensor.type is kind:
            return tensor.raw()
        x = dequantize(tensor)
        with _named(tensor):
            if kind in ENCODED:
                return encode(x.reshape(-1, x.shape[-1]), kind)
            check_finite(x)
        if kind is TensorType.BF16:
            return (rounded(x, "bf16").view(np.uint32) >> 16).astype(np.uint16)
        assert kind is TensorType.F32
        return x

    return read


@contextmanager
def _named(tensor: Tensor) -> Iterator[None]:
    """What is wrong with weights, with the name of the tensor."""
    try:
        yield
    except UsageError as e:
        raise UsageError(f"{tensor.name}: {e}", *e.suggestions) from None
