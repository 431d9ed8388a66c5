"""Loads lowered programs into the native runtime, and runs them there."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path

from octavo import _native
from octavo.backends.base import (
    Counters,
    Floats,
    Footprint,
    ProgramOptions,
    Sample,
    StepInput,
    StepLimits,
    Traced,
)
from octavo.backends.cpu.adapters import LoadedAdapters
from octavo.backends.cpu.lower import Lowered, interruptible
from octavo.backends.cpu.parts import residual_parts
from octavo.backends.cpu.recorder import Recorder
from octavo.checkpoint.progress import Advance
from octavo.errors import UsageError
from octavo.program import Program

LOG = logging.getLogger(__name__)
PACKED_BYTES = 16 << 20  # of weights at a time
PREFAULTED_BYTES = 4 << 20  # of the KV cache at a time
PREFAULT = 16 << 20  # bytes of the KV cache past what is used
IDLE_PREFAULT = 256 << 20  # while there is no work
SPARE_PARTIALS = 1024  # attention results beyond one a token: long contexts are split into these


class CpuExecutable:
    """A program in the native runtime."""

    def __init__(
        self, model: _native.Model, limits: StepLimits, program: Program, output: int, hidden: int,
        taps: list[int], matrices: dict[str, int], pauses: list[int], parts: list[range],
    ) -> None:  # fmt: skip
        self.model = model
        self.pauses = pauses
        self._parts = parts  # native operations of each
        self.limits = limits
        self.task, self.causal = program.task, program.causal
        self._output, self._hidden, self._taps = output, hidden, taps  # buffers
        self.matrices = matrices  # by tensor name
        self.adapters: LoadedAdapters | None = None

    @property
    def kernels(self) -> str:
        return self.model.isa

    @property
    def threads(self) -> int:
        return self.model.threads

    @property
    def operations(self) -> int:
        return self.model.operations

    @property
    def counters(self) -> Counters:
        return Counters(*self.model.profile(), self.model.expert_bytes)

    def start_trace(self, spans: int) -> None:
        self.model.start_trace(spans)

    def take_trace(self) -> Traced:
        return Traced(*self.model.take_trace())

    def step(self, step: StepInput) -> list[Sample]:
        return self.decode(step, 1, [])[0]

    def decode(
        self, step: StepInput, steps: int, ends: list[list[int]], brief: bool = False
    ) -> list[list[Sample]]:
        rows = self.model.step(
            step.ids, step.positions, step.spans, step.block_tables, step.logits_indices,
            step.sampling, step.token_type_ids,
            step.all_logits or self.task != "generate", steps, ends,
            step.embeddings, step.embedding_rows, step.kv_writes, step.reach, step.coordinates,
            step.segments, brief=brief,
        )  # fmt: skip
        return [list(map(Sample._make, each)) for each in rows]

    @property
    def parts(self) -> int:
        return len(self._parts)

    def skip(self, parts: Collection[int]) -> None:
        self.model.skip([i for part in parts for i in self._parts[part]])

    def run(self, step: StepInput, first: int, last: int) -> None:
        self.model.step(
            step.ids, step.positions, step.spans, step.block_tables, step.logits_indices, [],
            step.token_type_ids, True, 1, [], step.embeddings, step.embedding_rows, step.kv_writes,
            step.reach, step.coordinates, step.segments, first, last,
        )  # fmt: skip

    def logits(self, rows: int) -> Floats:
        """The output of the last step's selected rows, `[rows, width]`, copied."""
        return self.model.rows(self._output, 0, rows)

    def hidden(self, first: int, count: int) -> Floats:
        return self.model.rows(self._hidden, first, count)

    def tapped(self, tap: int, rows: int) -> Floats:
        return self.model.rows(self._taps[tap], 0, rows)

    def pack_pending(self) -> bool:
        """Packs more weights, or measures those of the head. Returns True while any remain."""
        return self.model.pack(PACKED_BYTES)

    def prefault_kv(self, reached: int, idle: bool) -> bool:
        """Prefaults unused KV blocks: a step would take their memory a page at a time."""
        ahead = IDLE_PREFAULT if idle else PREFAULT
        return self.model.prefault_kv(reached, ahead, PREFAULTED_BYTES)

    def copy_block(self, source: int, target: int) -> None:
        self.model.copy_block(source, target)


def _keep(model: _native.Model, packed: Path) -> None:
    """Writes packed weights, in place of those of older states of the same model. A folder that
    cannot be written is logged: the next start packs them anew."""
    try:
        _replace(model, packed)
    except OSError as e:
        LOG.warning("packed weights are not kept in %s: %s", packed.parent, e.strerror or e)


def _replace(model: _native.Model, packed: Path) -> None:
    """Writes packed weights and deletes those of older states. Raises OSError."""
    packed.parent.mkdir(parents=True, exist_ok=True)
    part = packed.with_suffix(f".{os.getpid()}")
    if model.save_weights(str(part)):
        part.replace(packed)
        for old in packed.parent.glob(f"{packed.stem.split('-')[0]}-*"):
            process = old.suffix.removeprefix(".")  # of one that still writes, if it lives
            if old != packed and not (process.isdigit() and Path("/proc", process).exists()):
                old.unlink(missing_ok=True)


def _map(model: _native.Model, packed: Path, used: int) -> bool:
    """Takes packed weights from a file, if there is a sound one."""
    if model.map_weights(str(packed), used):
        return True
    if packed.exists():
        LOG.warning("packed weights in %s are damaged: packing them anew", packed.name)
        packed.unlink(missing_ok=True)
    return False


def host_isa() -> str:
    """The best instruction set the host runs, or the one `OCTAVO_ISA` names."""
    try:
        return _native.isa(os.environ.get("OCTAVO_ISA", ""))
    except RuntimeError as e:
        raise UsageError(str(e), "OCTAVO_ISA=scalar octavo doctor") from None


def _record(
    lowered: Lowered, model: _native.Model, options: ProgramOptions, progress: Advance
) -> Recorder:
    """Records everything that takes weights or buffers."""
    recorder = Recorder(
        lowered, model, progress, defer=not options.packed, activations=options.activations,
        remainder=not options.bf16_inputs,
    )  # fmt: skip
    layers = [(layer.kv_heads, layer.head_dim) for layer in lowered.program.cache]
    partials = options.limits.tokens + SPARE_PARTIALS
    model.allocate_cache(layers, options.limits.blocks, options.kv_dtype, partials)
    return recorder


def footprint(lowered: Lowered, options: ProgramOptions) -> Footprint:
    """What `load` allocates, by recording into a model that only counts. Reads no weights."""
    limits = options.limits
    model = _native.Model(host_isa(), options.threads, limits.tokens, limits.selected)
    _record(lowered, model, options, lambda _: None)
    return Footprint(model.weight_bytes, model.buffer_bytes, model.cache_bytes)


def block_bytes(lowered: Lowered, kv_dtype: str) -> int:
    """Bytes of one KV block over all layers."""
    return sum(
        _native.cache_block_bytes(layer.kv_heads, layer.head_dim, kv_dtype)
        for layer in lowered.program.cache
    )


def load(
    lowered: Lowered,
    options: ProgramOptions,
    progress: Advance = lambda _: None,
    file: Path | None = None,
    beside: CpuExecutable | None = None,
) -> CpuExecutable:
    """Packs the weights, all but those left to `pack_pending`, and allocates what steps can need.

    file: where packed weights are kept if `options.packed`: mapped if it is there and sound, else
    written, with all of them. beside: see `Compiled.load`.
    """
    size, limits = footprint(lowered, options), options.limits
    model = _native.Model(
        host_isa(), options.threads, limits.tokens, limits.selected, size.weights, size.buffers,
        beside.model if beside is not None else None,
    )  # fmt: skip
    mapped = file is not None and _map(model, file, size.weights)
    recorder = _record(lowered, model, options, progress)
    if file is not None and not mapped:
        _keep(model, file)
    program = lowered.program
    output, hidden = recorder.buffer(program.output), recorder.buffer(program.hidden)
    taps, starts = [recorder.buffer(tap) for tap in program.taps], recorder.starts
    parts = [range(starts[p.start], starts[p.stop]) for p in residual_parts(lowered)]
    pauses = interruptible(lowered)
    return CpuExecutable(
        model, limits, program, output, hidden, taps, recorder.matrix, pauses, parts
    )
