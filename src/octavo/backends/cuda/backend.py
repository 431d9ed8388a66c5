"""The CUDA backend as others see it. Compiling and planning import no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.backends.base import (
    DeviceBytes,
    Executable,
    Footprint,
    PackedMatrices,
    ProgramOptions,
    StepLimits,
)
from octavo.backends.cuda.lower import Launches, lower
from octavo.backends.cuda.memory import DeviceMemory
from octavo.backends.cuda.probe import device_bytes, usable_gpu
from octavo.checkpoint import Checkpoint, TensorType
from octavo.checkpoint.grouped import Grouped
from octavo.checkpoint.progress import Advance
from octavo.errors import Unsupported
from octavo.program import Program

ON_CPU = ("--device cpu",)


@dataclass(frozen=True)
class CudaCompiled:
    """A program's launches, and the GPU that will compute them."""

    launches: Launches
    number: int = 0
    adapters: bool = False

    @property
    def program(self) -> Program:
        return self.launches.program

    @property
    def matrices(self) -> list[PackedMatrices]:
        groups: dict[tuple[TensorType, int], list[tuple[int, int, int]]] = {}
        for spec in self.launches.matrices:
            t = spec.tensors[0]
            bits = t.bits if isinstance(t, Grouped) else 8 * t.type.block[1] // t.type.block[0]
            sizes = len(spec.tensors), spec.stored, spec.nbytes
            groups.setdefault((t.type, bits), []).append(sizes)
        out = [
            PackedMatrices(*k, *map(sum, zip(*sizes, strict=True))) for k, sizes in groups.items()
        ]
        return sorted(out, key=lambda k: -k.packed)

    def activations(self, asked: str) -> str:
        if asked in ("int8", "int16"):
            raise Unsupported(f"--activations {asked} on a GPU, whose layers read bf16", *ON_CPU)
        return "bf16"

    @property
    def device(self) -> str:
        return f"cuda:{self.number}"

    @property
    def device_memory(self) -> DeviceBytes | None:
        return device_bytes(self.number)

    def kv_dtype(self, asked: str) -> str:
        if asked not in ("auto", "bf16"):
            raise Unsupported(f"--kv-dtype {asked} on a GPU, which caches bf16", *ON_CPU)
        return "bf16"

    def block_bytes(self, kv_dtype: str) -> int:
        return DeviceMemory(self.launches, StepLimits(1, 1, 1)).cache.nbytes

    def footprint(self, options: ProgramOptions) -> Footprint:
        return DeviceMemory(self.launches, options.limits).footprint

    def load(
        self, checkpoint: Checkpoint, options: ProgramOptions, progress: Advance = lambda _: None,
        beside: Executable | None = None,
    ) -> Executable:  # fmt: skip
        if options.packed:
            raise Unsupported("packed weights kept on disk (--packed-cache) on a GPU", *ON_CPU)
        from octavo.backends.cuda.device import check_room, current, kernels_of, torch_device
        from octavo.backends.cuda.executable import CudaExecutable
        from octavo.backends.cuda.placed import Placed

        device = torch_device(self.number)
        memory = DeviceMemory(self.launches, options.limits)
        check_room(device, memory.footprint.total)
        with current(device):
            return CudaExecutable(Placed(memory, device, progress), kernels_of(device))


@dataclass(frozen=True)
class CudaBackend:
    """Computes on the NVIDIA GPU of that number, which loading asks for first."""

    number: int = 0

    @property
    def kernels(self) -> list[str]:
        """The GPU's, if there is one. Raises DeviceUnusable."""
        return ["sm_{}{}".format(*usable_gpu(self.number).capability)]

    def compile(self, program: Program, adapters: bool = False) -> CudaCompiled:
        if adapters:
            raise Unsupported("LoRA adapters on a GPU", *ON_CPU)
        return CudaCompiled(lower(program), self.number)

    def packed_files(self, folder: Path) -> list[Path]:
        return []
