from collections.abc import Sequence
from typing import TypeAlias, overload

import numpy as np
import numpy.typing as npt

from octavo.backends.base import SamplingRow, Span

Bytes: TypeAlias = npt.NDArray[np.uint8]
Ints: TypeAlias = npt.NDArray[np.int32]
Floats: TypeAlias = npt.NDArray[np.float32]
Sample: TypeAlias = tuple[int, float, list[int], list[float]]

WIDEST_HEAD: int
LAYOUT_VERSION: int

def isa(isa: str = "") -> str: ...
def isas() -> list[str]: ...
def is_fixed(type: int, /) -> bool: ...
def matrix_bytes(type: int, group: int, rows: int, cols: int, /) -> int: ...
def cache_block_bytes(heads: int, head_dim: int, type: str, /) -> int: ...
def uniform(seed: int, position: int) -> float: ...
def linear(
    isa: str,
    type: int,
    group: int,
    data: Bytes,
    rows: int,
    cols: int,
    x: Floats,
    tile: int,
    threshold: float | None = None,
    remainder: bool = True,
) -> Floats: ...
def attend(
    isa: str,
    type: str,
    q: Floats,
    k: Floats,
    v: Floats,
    first: Ints,
    last: Ints,
    scale: float,
    softcap: float,
    former: float,
    tile: int,
) -> Floats: ...
def unpack(type: int, group: int, data: Bytes, rows: int, cols: int) -> Floats: ...
def measure_limits(
    isa: str, threads: int, bytes: int, seconds: float
) -> tuple[float, float, float]: ...
def time_linear(
    isa: str,
    type: int,
    group: int,
    rows: int,
    cols: int,
    threshold: float | None,
    tokens: int,
    threads: int,
    copies: int,
    seconds: float,
) -> float: ...
def time_attention(
    isa: str, type: str, head_dim: int, queries: int, keys: int, seconds: float
) -> float: ...
def sample(isa: str, logits: Floats, row: SamplingRow, measured: bool = False) -> Sample: ...

class Forms:
    """Copies of a linear layer's input."""

    def __init__(
        self, *, fixed: bool, grouped: bool, scaled: bool, bf16: bool, f32: bool,
        threshold: float = 0.0, remainder: bool = True,
    ) -> None: ...  # fmt: skip

class LinearPart:
    def __init__(self, *, matrix: int = -1, out: int = -1, bias: int = -1) -> None: ...

class Expert:
    def __init__(
        self, *, gate: int, up: int, down: int, gate_bias: int, up_bias: int, down_bias: int
    ) -> None: ...

class Attention:
    def __init__(
        self,
        *,
        q: int,
        k: int,
        v: int,
        layer: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        schedule: int,
        q_norm: int,
        k_norm: int,
        rope: int,
        sinks: int,
        act: int,
        scale: float,
        eps: float,
        softcap: float,
        interleaved: bool,
    ) -> None: ...

class Model:
    @overload
    def __init__(self, isa: str, threads: int, tokens: int, selected: int) -> None: ...
    @overload
    def __init__(
        self,
        isa: str,
        threads: int,
        tokens: int,
        selected: int,
        weight_bytes: int,
        buffer_bytes: int,
        beside: Model | None = None,
    ) -> None: ...
    @property
    def needs_weights(self) -> bool: ...
    def add_matrix(self, type: int, group: int, data: Bytes, rows: int, cols: int, /) -> int: ...
    def add_stored(self, type: int, data: Bytes, rows: int, cols: int, /) -> int: ...
    def read_stored(self) -> None: ...
    def pack(self, bytes: int, /) -> bool: ...
    def map_weights(self, path: str, bytes: int, /) -> bool: ...
    def save_weights(self, path: str, /) -> bool: ...
    def add_vector(self, data: Floats, size: int, /) -> int: ...
    def add_buffer(self, selected: bool, width: int, /) -> int: ...
    def add_act(
        self, selected: bool, width: int, forms: Forms, adapted: Forms, apart: bool
    ) -> int: ...
    def add_rope(self, frequencies: Floats, factor: float, axes: Ints, /) -> int: ...
    def add_order(self, order: Ints, /) -> int: ...
    def allow_adapters(self) -> None: ...
    def add_adapter(
        self, parts: Sequence[tuple[int, int, Bytes, Bytes, int, int, int, float]], /
    ) -> int: ...
    def remove_adapter(self, slot: int, /) -> None: ...
    def add_schedule(self, window: int, causal: bool, group: int, segmented: bool, /) -> int: ...
    def embed(
        self, matrix: int, out: int, scale: float, index: int, offset: int, replaceable: bool, /
    ) -> None: ...
    def inject(self, source: int, out: int, first: int, /) -> None: ...
    def select_rows(self, source: int, out: int, act: int, /) -> None: ...
    def layer_norm(
        self, source: int, weight: int, bias: int, eps: float, out: int, act: int, /
    ) -> None: ...
    def norm(
        self, source: int, weight: int, eps: float, out: int, residual: int, act: int, /
    ) -> None: ...
    def add(self, a: int, b: int, out: int, /) -> None: ...
    def linear(self, act: int, parts: list[LinearPart], residual: int, /) -> None: ...
    def gated(
        self, source: int, gate: LinearPart, up: LinearPart, kind: int, mid: int, act: int
    ) -> None: ...
    def attention(self, attention: Attention, /) -> None: ...
    def glu(self, gate: int, up: int, kind: int, act: int, /) -> None: ...
    def softcap(self, buffer: int, cap: float, /) -> None: ...
    def emit(self, buffer: int, source: int, order: int, width: int, act: int, /) -> None: ...
    def route(self, source: int, out: int, top: int, normalize: bool, /) -> None: ...
    def add_expert_rows(
        self, experts: int, used: int, hidden: int, ffn: int, inputs: Forms, between: Forms
    ) -> int: ...
    def experts(
        self,
        x: int,
        routes: int,
        parts: list[Expert],
        kind: int,
        rows: int,
        out: int,
        residual: int,
    ) -> None: ...
    def output(self, buffer: int, vocabulary: int, last: bool, /) -> None: ...
    def allocate_cache(
        self, layers: list[tuple[int, int]], blocks: int, type: str, parts: int
    ) -> None: ...
    def prefault_kv(self, reached: int, ahead: int, bytes: int, /) -> bool: ...
    def copy_block(self, source: int, target: int, /) -> None: ...
    def step(
        self,
        ids: Ints,
        positions: Ints,
        spans: list[Span],
        block_tables: Ints,
        logits_indices: Ints,
        sampling: list[SamplingRow],
        token_type_ids: Ints,
        all_logits: bool,
        steps: int,
        ends: list[list[int]],
        embeddings: Floats | None = None,
        embedding_rows: Ints | None = None,
        kv_writes: Ints | None = None,
        reach: Ints | None = None,
        coordinates: Ints | None = None,
        segments: Ints | None = None,
        first_op: int = 0,
        last_op: int | None = None,
        brief: bool = False,
    ) -> list[list[Sample]]: ...
    def skip(self, ops: list[int], /) -> None: ...
    def start_trace(self, spans: int, /) -> None: ...
    def take_trace(self) -> tuple[list[str], list[bytes], bool]: ...
    def profile(self) -> tuple[int, float, dict[str, float]]: ...
    def rows(self, buffer: int, first: int, count: int, /) -> Floats: ...
    @property
    def expert_bytes(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def operations(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def buffer_bytes(self) -> int: ...
    @property
    def cache_bytes(self) -> int: ...
