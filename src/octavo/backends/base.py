"""What a backend is: it compiles programs, says what they take, loads them and computes steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from octavo.checkpoint import Checkpoint, TensorType
from octavo.checkpoint.progress import Advance
from octavo.program import Program, Task, branches

BLOCK = 16  # tokens per KV block

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
NO_INTS: Ints = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Sizes fixed at compile time: tokens of a step, rows with logits in it, KV blocks."""

    tokens: int
    selected: int
    blocks: int


@dataclass(frozen=True, slots=True)
class ProgramOptions:
    """How to load a program. packed: keep packed weights in a file and map them at the next start.
    adapter_bytes: what LoRA adapters may take together. activations: how inputs of quantized linear
    layers are rounded, as `Compiled.activations` gave it. bf16_inputs: layers with bf16 weights
    read inputs that are rounded to bf16, too; so are queries of bf16 keys that have bf16
    products."""

    limits: StepLimits
    threads: int
    kv_dtype: str
    packed: bool = False
    adapter_bytes: int = 0
    activations: str = "int16"
    bf16_inputs: bool = False


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a loaded program allocates."""

    weights: int
    buffers: int
    cache: int

    @property
    def total(self) -> int:
        return self.weights + self.buffers + self.cache


class DeviceBytes(NamedTuple):
    """Memory of a device: all of it, and what a process takes beside programs."""

    total: int
    process: int


@dataclass(frozen=True, slots=True)
class PackedMatrices:
    """All matrices of one type: their bytes in the file and when packed. bits: of a code in the
    file."""

    type: TensorType
    bits: int
    count: int
    stored: int
    packed: int


class Counters(NamedTuple):
    """Since loading: steps, seconds in them, seconds by operation, bytes of experts read."""

    steps: int
    seconds: float
    phases: dict[str, float]
    expert_bytes: int


# What a thread did from `begin` to `end`, by time.perf_counter_ns; from `worked` on it waited for
# other threads. bytes: of weights, keys and values that it takes all threads to read. operations:
# two for a multiplication and addition. executed: byte operations of integer kernels.
TRACED = np.dtype(
    [(n, np.int64) for n in ("name", "begin", "worked", "end")]
    + [(n, np.float64) for n in ("bytes", "operations", "executed")]
)


class Traced(NamedTuple):
    """What was recorded of steps. threads: of each its spans, rows of TRACED with the number of
    their name. full: spans are missing, for there were too many."""

    names: list[str]
    threads: list[bytes]
    full: bool


class Span(NamedTuple):
    """Consecutive tokens of one sequence in a step: rows `[first, first + length)`.

    position: in the cache, of the first token. table: offset of the sequence's block table in
    `block_tables`. adapter: slot of its LoRA adapter, or -1.
    """

    first: int
    length: int
    position: int
    table: int
    adapter: int = -1


class SamplingRow(NamedTuple):
    """How to pick the next token of one selected row. `top_k` 0: all; `logprobs` -1: none.

    target: a token to report instead of drawing one, -1 to draw. legal: `logprobs` alternatives are
    the best of what mask and adjustments leave. mask: empty, or 32 tokens in every 4 bytes, with
    the bits of those that may be drawn set.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_k: int = 0
    logprobs: int = -1
    target: int = -1
    legal: bool = False
    seed: int = 0
    position: int = 0
    adjustments: list[tuple[int, float, float]] = []  # (token, addend, repetition penalty)
    mask: bytes = b""


class Sample(NamedTuple):
    """The token picked (-1: none may be), its log-probability, the most likely ones with theirs."""

    token: int
    logprob: float
    top_tokens: list[int]
    top_logprobs: list[float]

    @property
    def alternatives(self) -> list[tuple[int, float]]:
        if not self.top_tokens:
            return []
        return list(zip(self.top_tokens, self.top_logprobs, strict=True))


@dataclass(frozen=True, slots=True)
class StepInput:
    """Tokens of several sequences, each a span of consecutive positions.

    ids: `[T]`. positions: `[T]`, for rotations and tables of positions. spans: cover the rows in
    order. logits_indices: rows whose results are computed; the first `len(sampling)` of them are
    sampled. token_type_ids: `[T]` segment numbers, or empty for all 0. all_logits: the logits of
    selected rows will be read; else those that no sample needs may be left out.

    embeddings: `[E, width]` rows that replace the embeddings of the rows `embedding_rows`, which
    ascend. kv_writes: `[W, 2]` of row, offset of a block table in `block_tables`: stores the row's
    keys and values at its position of that table, too (see `tree_spans`). reach: `[T]`, how many
    later tokens of its span a row of a causal attention sees as well, as those of an image do.
    coordinates: `[axes, T]`, for rotations along several axes; None: the positions along each.
    segments: `[T]`, which ascend within a span, for attention within segments.
    """

    ids: Ints
    positions: Ints
    spans: list[Span]
    block_tables: Ints
    logits_indices: Ints
    sampling: list[SamplingRow] = field(default_factory=list)
    token_type_ids: Ints = field(default_factory=lambda: NO_INTS)
    all_logits: bool = True
    embeddings: Floats | None = None
    embedding_rows: Ints | None = None
    kv_writes: Ints | None = None
    reach: Ints | None = None
    coordinates: Ints | None = None
    segments: Ints | None = None


def tree_spans(
    parents: Sequence[int], row: int, position: int, tables: Sequence[int], adapter: int = -1
) -> tuple[list[Span], list[tuple[int, int]]]:
    """Spans and `kv_writes` of a tree of candidates (`octavo.program.tree`) in a step.

    row, position: those of the tree's first token. tables: of each branch the offset of a block
    table in `block_tables`. Each branch is a sequence of its own: its table begins with the blocks
    that hold the positions before the tree, which branches share; from the block of `position` on
    the blocks are its own, and what the first of them holds before the tree is copied into it
    (`copy_block`). Rows that several branches pass through are computed once and stored in each.
    So a branch that is accepted is the sequence, without anything being moved.
    """
    spans: list[Span] = []
    writes: list[tuple[int, int]] = []
    for branch, table in zip(branches(parents), tables, strict=True):
        start = position + len(branch.ancestors)
        spans.append(Span(row + branch.first, branch.count, start, table, adapter))
        writes += [(row + ancestor, table) for ancestor in branch.ancestors]
    return spans, writes


class Adapters(Protocol):
    """The LoRA adapters that are loaded, by name. All methods raise RequestError."""

    def load(self, name: str, path: Path) -> None:
        """Loads an adapter from a PEFT folder."""
        ...

    def unload(self, name: str) -> None:
        """Unloads an adapter once the requests that use it have ended."""
        ...

    def acquire(self, name: str) -> tuple[int, str]:
        """Its slot, and a key that sets its cached prefixes apart; in use until `release`."""
        ...

    def release(self, name: str) -> None: ...


class Executable(Protocol):
    """A compiled program with its weights and its KV cache of `limits.blocks` blocks."""

    limits: StepLimits
    task: Task
    causal: bool

    @property
    def adapters(self) -> Adapters | None:
        """None if the program was compiled without."""
        ...

    @property
    def kernels(self) -> str:
        """Name of the kernels in use, such as an instruction set."""
        ...

    @property
    def threads(self) -> int: ...

    @property
    def operations(self) -> int:
        """Operations begun since loading. May be read by any thread while a step runs."""
        ...

    @property
    def counters(self) -> Counters: ...

    def start_trace(self, spans: int) -> None:
        """Records what each thread does from now on, that many spans of all of them at most."""
        ...

    def take_trace(self) -> Traced:
        """What has been recorded; ends it."""
        ...

    def step(self, step: StepInput) -> list[Sample]:
        """Computes the step: writes keys and values, samples the selected rows."""
        ...

    @property
    def pauses(self) -> list[int]:
        """Numbers of operations before which a step can be interrupted; the last is their count."""
        ...

    def run(self, step: StepInput, first: int, last: int) -> None:
        """Computes operations [first, last) of a step that samples nothing, both of `pauses` or 0.
        Those before have been computed: a long step can be computed a little at a time."""
        ...

    def decode(
        self, step: StepInput, steps: int, ends: list[list[int]], brief: bool = False
    ) -> list[list[Sample]]:
        """Up to `steps` steps of spans of one token, all sampled: what one draws the next computes.

        Stops early after a step that draws, for some row, one of its `ends` or no token. brief:
        without the parts that `skip` has named.
        """
        ...

    @property
    def parts(self) -> int:
        """Parts of layers that can be left out, such as an attention or a feed-forward block: what
        they compute is only added to what passes through. Numbered in their order."""
        ...

    def skip(self, parts: Collection[int]) -> None:
        """Names the parts that brief steps leave out."""
        ...

    def logits(self, rows: int) -> Floats:
        """Logits of the last step's first selected rows `[rows, vocabulary]`, copied."""
        ...

    def hidden(self, first: int, count: int) -> Floats:
        """States of the last step's selected rows `[count, width]`, or results of other tasks."""
        ...

    def tapped(self, tap: int, rows: int) -> Floats:
        """The first rows of one of the program's taps `[rows, width]`, copied."""
        ...

    def pack_pending(self) -> bool:
        """Packs up to 16 MiB more weights, or does as much other work left over from loading.
        Returns True while any remains."""
        ...

    def prefault_kv(self, reached: int, idle: bool) -> bool:
        """Prefaults unused KV blocks from `reached` on, more of them while `idle`. Returns True if
        more remain."""
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copies a KV block, all layers."""
        ...


class Compiled(Protocol):
    """A program as a backend will run it, before its weights are loaded."""

    @property
    def program(self) -> Program: ...

    @property
    def adapters(self) -> bool:
        """True if LoRA adapters may be loaded."""
        ...

    @property
    def matrices(self) -> list[PackedMatrices]:
        """What the weight matrices become, the largest part first."""
        ...

    def activations(self, asked: str) -> str:
        """How inputs of quantized linear layers are rounded on this host if "auto", "int8" or
        "int16" is asked for: by groups with one digit ("int8"), with a second where it matters
        ("auto"), or by rows with two ("int16")."""
        ...

    def kv_dtype(self, asked: str) -> str:
        """What keys and values are cached as if that is asked for; "auto": as the program wants
        them, or what suits it. Raises Unsupported."""
        ...

    @property
    def device(self) -> str:
        """What it is compiled for: "cpu", or "cuda:" and a number."""
        ...

    @property
    def device_memory(self) -> DeviceBytes | None:
        """Of a device with memory of its own; None for the host's. Raises DeviceUnusable."""
        ...

    def block_bytes(self, kv_dtype: str) -> int:
        """Bytes of one KV block over all layers."""
        ...

    def footprint(self, options: ProgramOptions) -> Footprint:
        """What `load` allocates with these options. Reads no weights."""
        ...

    def load(
        self, checkpoint: Checkpoint, options: ProgramOptions, progress: Advance = lambda _: None,
        beside: Executable | None = None,
    ) -> Executable:  # fmt: skip
        """Loads the weights; `checkpoint` is read until `pack_pending` returns False. beside: one
        that is never run at the same time, whose threads are used."""
        ...


class Backend(Protocol):
    """One way to compute programs, such as this host's CPU."""

    @property
    def kernels(self) -> list[str]:
        """Names of the kernels that run on this host, the best first."""
        ...

    def compile(self, program: Program, adapters: bool = False) -> Compiled:
        """Prepares a program; `adapters`: LoRA adapters may be loaded. Raises Unsupported."""
        ...

    def packed_files(self, folder: Path) -> list[Path]:
        """Files with packed weights of the models that lie in `folder`."""
        ...
