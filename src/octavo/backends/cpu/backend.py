"""The CPU backend as others see it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo import _native
from octavo.backends.base import DeviceBytes, Executable, Footprint, PackedMatrices, ProgramOptions
from octavo.backends.cpu.activations import resolve
from octavo.backends.cpu.adapters import LoadedAdapters
from octavo.backends.cpu.executor import CpuExecutable, block_bytes, footprint, host_isa, load
from octavo.backends.cpu.lower import Lowered, lower
from octavo.backends.cpu.packed import packed_below, packed_file
from octavo.backends.cpu.weights import packed_matrices
from octavo.checkpoint import Checkpoint
from octavo.checkpoint.progress import Advance
from octavo.program import Experts, Program


def cache_type(program: Program, asked: str = "auto") -> str:
    """What keys and values are cached as, unless it was asked for: what the checkpoint says, else
    bf16, and fp32 where experts are routed to, because a router close to a tie makes another expert
    of the cache's rounding."""
    asked = program.kv_dtype if asked == "auto" else asked
    if asked != "auto":
        return asked
    return "f32" if any(isinstance(op, Experts) for op in program.ops) else "bf16"


@dataclass(frozen=True)
class CpuCompiled:
    """A lowered program."""

    lowered: Lowered

    @property
    def program(self) -> Program:
        return self.lowered.program

    @property
    def adapters(self) -> bool:
        return self.lowered.adapters

    @property
    def matrices(self) -> list[PackedMatrices]:
        return packed_matrices(self.lowered)

    def activations(self, asked: str) -> str:
        return resolve(asked, self.program, host_isa())

    def kv_dtype(self, asked: str) -> str:
        return cache_type(self.program, asked)

    @property
    def device(self) -> str:
        return "cpu"

    @property
    def device_memory(self) -> DeviceBytes | None:
        return None

    def block_bytes(self, kv_dtype: str) -> int:
        return block_bytes(self.lowered, kv_dtype)

    def footprint(self, options: ProgramOptions) -> Footprint:
        return footprint(self.lowered, options)

    def load(
        self, checkpoint: Checkpoint, options: ProgramOptions, progress: Advance = lambda _: None,
        beside: Executable | None = None,
    ) -> CpuExecutable:  # fmt: skip
        file = packed_file(checkpoint) if options.packed else None
        same = beside if isinstance(beside, CpuExecutable) else None
        executable = load(self.lowered, options, progress, file, same)
        if self.adapters:
            executable.adapters = LoadedAdapters(
                checkpoint, self.program, executable.model, executable.matrices,
                options.adapter_bytes,
            )  # fmt: skip
        return executable


class CpuBackend:
    """Computes on this host's CPU."""

    @property
    def kernels(self) -> list[str]:
        return _native.isas()

    def compile(self, program: Program, adapters: bool = False) -> CpuCompiled:
        return CpuCompiled(lower(program, adapters))

    def packed_files(self, folder: Path) -> list[Path]:
        return packed_below(folder)
