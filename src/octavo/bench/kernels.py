"""Single kernels against the limits of the host, which are measured in the same run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from octavo import _native
from octavo.backends.cpu.activations import second_lines
from octavo.checkpoint.base import BLOCKS, DIGITAL, PACKED, TensorType

SHAPES = ((576, 1536), (1536, 576))  # (inputs, outputs) of SmolLM2's gate and down projections
TOKENS = (1, 8, 32, 256)
COLD_BYTES = 256 << 20  # weights used in turn, so that each comes from memory
GROUP = 128  # columns that share a scale, where the format leaves it open
# integer products per weight and activation; of `auto` in most layers
DIGITS = {"auto": 10 / 8, "int8": 1, "int16": 2}
SECONDS = 0.15  # per figure


@dataclass(frozen=True)
class HostLimits:
    """read_gbs: memory to all threads. registers_gops, widest_gops: byte operations (two a product)
    of all threads in vector registers, and by the widest means of the instruction set (tiles)."""

    isa: str
    threads: int
    read_gbs: float
    registers_gops: float
    widest_gops: float

    def seconds(self, nbytes: float, operations: float) -> float:
        """Least time that reading and multiplying can take, each perfectly overlapped."""
        return max(nbytes / self.read_gbs, operations / self.widest_gops) / 1e9


@dataclass(frozen=True)
class KernelTime:
    """One kernel. nbytes: weights (or keys and values) read. operations: two per
    multiply-accumulate of the result. executed: those the kernel runs, which for integer formats is
    one product per digit of the activations. percent: of the time that the host's limits allow for
    `executed`, or 0 where the limits say nothing."""

    kernel: str
    shape: str
    tokens: int
    microseconds: float
    nbytes: int
    operations: float
    executed: float
    percent: float

    @property
    def gbs(self) -> float:
        return self.nbytes / self.microseconds / 1e3

    @property
    def gops(self) -> float:
        return self.operations / self.microseconds / 1e3


def measure_limits(isa: str, threads: int) -> HostLimits:
    return HostLimits(isa, threads, *_native.measure_limits(isa, threads, COLD_BYTES, 4 * SECONDS))


def _linear(
    limits: HostLimits, kind: TensorType, activations: str, k: int, n: int, tokens: int
) -> KernelTime:
    nbytes = _native.matrix_bytes(int(kind), GROUP, n, k)
    # Few tokens are bound by memory, so weights are cold; many are bound by arithmetic.
    copies = max(1, COLD_BYTES // nbytes) if tokens <= 8 else 1
    took = _native.time_linear(
        limits.isa, int(kind), GROUP, n, k, second_lines(activations), tokens,
        limits.threads, copies, SECONDS,
    )  # fmt: skip
    operations = 2.0 * k * n * tokens
    quantized = kind in DIGITAL
    executed = operations * (DIGITS[activations] if quantized else 1)
    # The byte limits say nothing of float products; those kernels are held against memory alone.
    bound = limits.seconds(nbytes if copies > 1 else 0, executed if quantized else 0)
    return KernelTime(
        kind.name, f"{k}->{n}", tokens, took * 1e6, nbytes, operations, executed, 100 * bound / took
    )


def _attention(limits: HostLimits, kind: str, queries: int, keys: int = 2048) -> KernelTime:
    head = 64
    took = _native.time_attention(limits.isa, kind, head, queries, keys, SECONDS)
    nbytes = keys // 16 * _native.cache_block_bytes(1, head, kind)
    operations = 4.0 * head * keys * queries
    return KernelTime(
        f"attention {kind}", f"{keys} keys x {head}", queries, took * 1e6, nbytes, operations,
        operations, 0.0,
    )  # fmt: skip


def bench_kernels(
    limits: HostLimits, kinds: tuple[TensorType, ...] = PACKED, activations: str = "int16"
) -> Iterator[KernelTime]:
    """Every format at every shape and token count, then attention on one thread from cache.
    activations: "auto", "int8" or "int16"."""
    for kind in kinds:
        for k, n in SHAPES:
            block = kind.block[0] if kind in BLOCKS else 1
            whole = -(-k // block) * block
            for tokens in TOKENS:
                yield _linear(limits, kind, activations, whole, n, tokens)
    for cache in ("bf16", "int8", "f32"):
        for queries in (1, 3, 16):
            yield _attention(limits, cache, queries)
