"""A folder of quantized layers of a folder of floats, or of a GGUF file seen as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from octavo.checkpoint.base import FLOATS, Checkpoint, Tensor, TensorType, tensor_bytes
from octavo.checkpoint.dequantize import dequantize
from octavo.checkpoint.places import check_new, check_outside, held
from octavo.checkpoint.progress import Advance, dropping_pages
from octavo.checkpoint.quantized import quantization_of
from octavo.checkpoint.writer import NewTensor, write_folder
from octavo.compress import layouts
from octavo.compress.beside import beside
from octavo.compress.calibrated import Task, layers_of
from octavo.compress.calibration import check_torch
from octavo.compress.fit import F32
from octavo.compress.grids import (
    Grid,
    Quantized,
    Scheme,
    float8,
    largest_group,
    quantize,
    quantize_affine,
)
from octavo.compress.jobs import Rounded, Say, weights_of
from octavo.compress.layouts import Tensors
from octavo.compress.packing import as_floats
from octavo.compress.reading import reads
from octavo.compress.recipes import Activations, FolderRecipe, Layout, check_rules
from octavo.compress.writing import converted, measured, module, named
from octavo.errors import UsageError, WriteError
from octavo.models import build_program, build_vision
from octavo.program import Experts, Linear, Program, Route, Weight


@dataclass(frozen=True)
class FolderJob:
    """See Job. texts: what a calibrated method sees of layers' inputs; kept: layers that stay as
    they are, whatever the recipe says; dynamic: whose inputs have a step a token; finish: makes
    `output` of the folder, which goes then, and gives its bytes."""

    checkpoint: Checkpoint
    recipe: FolderRecipe
    output: Path
    layout: Layout
    texts: Callable[[], Iterable[str]] = tuple
    kept: frozenset[str] = frozenset()
    dynamic: frozenset[str] = frozenset()
    finish: Callable[[Path], int] | None = None

    def __post_init__(self) -> None:
        """Raises UsageError for what cannot be rounded or stored so, and without the torch that a
        method needs; what `check_new` does."""
        recipe, name = self.recipe, self.checkpoint.path.name
        if self.layout not in recipe.layouts:
            raise UsageError(
                f"{recipe.name} is not stored as {self.layout}; {', '.join(recipe.layouts)} are",
                f"--format {recipe.layouts[0]}",
            )
        if quantization_of(self.checkpoint.metadata) is not None:
            raise UsageError(f"{name} is quantized already; take the model it was made from")
        if self.finish is None and self.output.suffix in (".gguf", ".safetensors"):
            raise UsageError(f"{self.output} is no name for a folder", "--output model-4bit")
        if not self.linear:
            raise UsageError(f"the layers of {name} lie transposed or stacked; none can be rounded")
        if recipe.vision is not None and not self.tower:
            raise UsageError(
                f"{name} takes no images, which {recipe.name} is for", "--recipe gptq-4"
            )
        check_rules(recipe, self.layers, self.checkpoint.tensors)
        if not self.schemes and recipe.kv is None:
            if any(self._scheme_of(n) for n in self.linear if n not in self.kept):
                raise UsageError(
                    f"{recipe.name} rounds no layer of {name}: 32 divides the rows and columns of "
                    "none",
                    "--recipe int8-dynamic",
                )
            raise UsageError(f"{recipe.name} rounds no layer of {name}: none fits, or all are kept")
        if recipe.method == "distilled" and self.program.task != "generate":
            raise UsageError(
                f"{recipe.name} learns from next tokens, and {name} generates no text",
                "--recipe healed-4",
            )
        if self.finish is None:
            check_new(self.output)
        check_outside(self.output, self.checkpoint.path)
        if recipe.calibrated:
            check_torch()

    # -- what would come of it ----------------------------------------------------------------

    @cached_property
    def program(self) -> Program:
        return build_program(self.checkpoint)

    @cached_property
    def tower(self) -> dict[str, Tensor]:
        """The weights of the layers of what encodes images, where the recipe is about them."""
        vision = build_vision(self.checkpoint) if self.recipe.vision is not None else None
        ops = () if vision is None else vision.tower.program.ops
        return {op.weight.tensor.name: op.weight.tensor for op in ops if isinstance(op, Linear)}

    @cached_property
    def layers(self) -> dict[str, Tensor]:
        """The weights of linear layers and experts, without routers and the head, by the names they
        are stored under; with those of `tower`."""
        routers = {op.x for op in self.program.ops if isinstance(op, Route)}
        weights: list[Weight] = []
        for op in self.program.ops:
            if isinstance(op, Linear) and not op.out.selected and op.out != self.program.output:
                weights += [] if op.out in routers else [op.weight]
            elif isinstance(op, Experts):
                weights += op.gate + op.up + op.down
        return {w.tensor.name.partition("[")[0]: w.tensor for w in weights} | self.tower

    @cached_property
    def linear(self) -> dict[str, Tensor]:
        """Those of `layers` that lie in the file as matrices of `[outputs, inputs]`."""
        stored = self.checkpoint.tensors
        upright = {n for n, t in self.layers.items() if n in stored and _upright(t, stored[n])}
        return {n: stored[n] for n in sorted(upright) if len(stored[n].shape) == 2}

    @cached_property
    def schemes(self) -> dict[str, Scheme]:
        """What each layer's weights become, of those that are rounded. Layers of one scheme have
        groups of one size, the largest that divides them all but those that none divides."""
        wanted = {n: self._scheme_of(n) for n in self.linear if n not in self.kept}
        fitted: dict[Scheme, Scheme | None] = {}
        for scheme in {s for s in wanted.values() if s is not None}:
            if scheme == "fp8" or not scheme.group:
                fitted[scheme] = scheme
                continue
            columns = {self.linear[n].shape[1] for n, s in wanted.items() if s == scheme}
            groups = [g for c in columns if (g := largest_group(c, scheme.group))]
            fitted[scheme] = replace(scheme, group=min(groups)) if groups else None
        out: dict[str, Scheme] = {}
        for name, first in wanted.items():
            found = fitted[first] if first is not None else None
            if found is not None and self._divides(name, found):
                out[name] = found
        return out

    def _scheme_of(self, name: str) -> Scheme | None:
        return self.recipe.vision if name in self.tower else self.recipe.scheme_of(name)

    @cached_property
    def activations(self) -> dict[str, Activations]:
        """What is done with the inputs of layers, where they are rounded."""
        own = {n: self._activations_of(n) for n in self.schemes}
        return {n: each for n, each in own.items() if each is not None}

    def _activations_of(self, name: str) -> Activations | None:
        own = name in self.tower or name in self.dynamic
        return "dynamic" if own else self.recipe.activations

    def _divides(self, name: str, scheme: Scheme) -> bool:
        if scheme == "fp8" or self._activations_of(name) is not None:  # bytes, in rows of any size
            return True
        t = self.linear[name]
        return t.shape[1] % (scheme.group or 32) == 0 and t.shape[0] % 32 == 0

    @property
    def work(self) -> int:
        passes = {"rtn": 0, "awq": 2, "smoothquant": 2, "distilled": 2}.get(self.recipe.method, 1)
        seen = self.schemes.keys() - self.tower.keys()
        return self.checkpoint.nbytes + passes * sum(self.linear[n].nbytes for n in seen)

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.output,)

    def forecast(self) -> Rounded:
        kinds, sizes = Counter[str](), dict[str, int]()
        for name, t in self.checkpoint.tensors.items():
            if name in self.schemes:
                kinds[self.layout] += 1
                parts = self._parts(name)
                sizes[name] = sum(tensor_bytes(p.type, p.shape, name) for p in parts.values())
            else:
                kinds[self._float(t).name] += 1
                sizes[name] = tensor_bytes(self._float(t), t.shape, name)
        groups = Counter(s.group for s in self.schemes.values() if isinstance(s, Grid))
        group = groups.most_common(1)[0][0] if groups else 0
        return Rounded(
            self.checkpoint.path, self.output, dict(kinds), weights_of(self.checkpoint),
            self.checkpoint.nbytes, sum(sizes.values()), group,
            tuple(sorted(self.layers.keys() - self.schemes.keys())), tuple(sorted(self.dynamic)),
            reads=reads(self.checkpoint, sizes),
        )  # fmt: skip

    @staticmethod
    def _float(t: Tensor) -> TensorType:
        """What a tensor that is not rounded is stored as."""
        return t.type if t.type in FLOATS else TensorType.BF16

    # -- doing it -----------------------------------------------------------------------------

    def run(self, progress: Advance = lambda _: None, say: Say = lambda _: None) -> Rounded:
        progress = dropping_pages(self.checkpoint, progress)
        if not self.recipe.calibrated:
            return self._make(self.output, self._round, self.checkpoint, progress)
        schemes = {n: s for n, s in self.schemes.items() if n not in self.tower}
        wanted = {n: self.linear[n] for n in schemes}
        task = Task(self.checkpoint, wanted, self.texts, self.recipe, self.output)
        with layers_of(task, schemes, progress, say) as made:
            job = replace(self, kept=made.kept, dynamic=made.dynamic)

            def layer(name: str) -> Tensors:
                if name in self.tower:
                    return self._round(name)
                return self._stored(name, *made.layer(name))

            done = job._make(made.output, layer, made.checkpoint, progress)
        return replace(done, losses=made.losses, resumed=made.resumed, learned=made.learned)

    def _make(
        self, folder: Path, make: Callable[[str], Tensors], checkpoint: Checkpoint,
        progress: Advance,
    ) -> Rounded:  # fmt: skip
        """Writes the folder, or what is made of it; see `_write`."""
        if self.finish is None:
            self._write(folder, make, checkpoint, progress)
            return self.forecast()
        place = self.output.with_name(f".{self.output.name}.octavo-folder")
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            with held(place, self.output, folder=True):
                named_so = place / self.checkpoint.path.resolve().name.removesuffix(".gguf")
                self._write(named_so, make, checkpoint, progress)
                return replace(self.forecast(), bytes_after=self.finish(named_so))
        except OSError as e:
            raise WriteError(f"cannot write {self.output}: {e.strerror or e}") from None

    def _write(
        self, output: Path, make: Callable[[str], Tensors], checkpoint: Checkpoint,
        progress: Advance,
    ) -> None:  # fmt: skip
        """make: the tensors of a layer. checkpoint: what everything else is read from."""
        out: dict[str, NewTensor] = {}
        for name, t in checkpoint.tensors.items():
            if name in self.schemes:
                own = name.removesuffix(".weight")
                made = module(self._parts(name), self._making(name, make, progress))
                out |= {f"{own}.{ending}": part for ending, part in made.items()}
            else:
                kind = self._float(self.checkpoint.tensors[name])  # scales may be folded into t
                out[name] = converted(t, kind, progress)
        config = dict(self.checkpoint.metadata) | self._config()
        write_folder(output, config, out, beside(self.checkpoint))

    def _making(
        self, name: str, make: Callable[[str], Tensors], progress: Advance
    ) -> Callable[[], Tensors]:
        def made() -> Tensors:
            with named(name):
                found = make(name)
            progress(self.linear[name].nbytes)
            return found

        return made

    def _round(self, name: str) -> Tensors:
        """A layer rounded to the nearest."""
        x, scheme = dequantize(self.linear[name]), self.schemes[name]
        if scheme == "fp8":
            q = float8(x)
            return self._plain(name, q.values()) or layouts.float_quantized(q)
        if self.layout == "mlx":
            return layouts.mlx(quantize_affine(x, scheme), (x.shape[0], x.shape[1]), scheme)
        return self._stored(name, quantize(x, scheme))

    def _stored(self, name: str, q: Quantized, step: float | None = None) -> Tensors:
        """The tensors of a rounded layer; step: of its inputs, if that is fixed."""
        return self._plain(name, q.values()) or layouts.integers(
            self.layout, q, int8=name in self.activations, step=step
        )

    def _plain(self, name: str, values: F32) -> Tensors:
        """The values themselves, where the folder holds floats; else nothing."""
        if self.layout != "safetensors":
            return {}
        kind = self._float(self.linear[name])
        return {"weight": NewTensor.of(as_floats(values, kind), kind)}

    def _parts(self, name: str) -> Tensors:
        """Types and shapes of what a layer becomes, found by making one of zeros."""
        rows, columns = self.linear[name].shape
        key = rows, columns, self.schemes[name], self.activations.get(name)
        if key not in self._shapes:
            made = self._plain(name, np.zeros((rows, columns), np.float32))
            if not made and key[2] == "fp8":
                made = layouts.float_quantized(float8(np.zeros((rows, columns), np.float32)))
            elif not made:
                assert isinstance(key[2], Grid)
                step = 1.0 if key[3] == "static" else None
                made = self._stored(name, Quantized.zeros_of((rows, columns), key[2]), step)
            self._shapes[key] = measured(made)
        return self._shapes[key]

    @cached_property
    def _shapes(self) -> dict[tuple[int, int, Scheme, Activations | None], Tensors]:
        return {}

    def _config(self) -> dict[str, Any]:
        if self.layout == "safetensors":
            return {}
        matrices = [n for n, t in self.checkpoint.tensors.items() if len(t.shape) == 2]
        kept = {
            n.removesuffix(".weight")
            for n in matrices
            if n.endswith(".weight") and n not in self.schemes
        }
        schemes = {n.removesuffix(".weight"): s for n, s in self.schemes.items()}
        inputs = {n.removesuffix(".weight"): each for n, each in self.activations.items()}
        rest = sorted({"lm_head", *kept})
        return layouts.config(self.layout, schemes, rest, inputs, self.recipe.kv)


def _upright(used: Tensor, stored: Tensor) -> bool:
    """True if the program uses a stored matrix, or rows of it, as it lies."""
    return used is stored or (used.name != stored.name and used.shape[1:] == stored.shape[1:])
