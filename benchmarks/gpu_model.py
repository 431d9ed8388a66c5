"""Random models in the shapes of Llama on a device, and what a piece of work takes there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from octavo.backends.base import BLOCK, SamplingRow, Span, StepInput, StepLimits
from octavo.backends.cuda.device import wait
from octavo.backends.cuda.executable import CudaExecutable
from octavo.backends.cuda.formats import MatrixSpec
from octavo.backends.cuda.lower import lower
from octavo.backends.cuda.memory import DeviceMemory
from octavo.backends.cuda.pack import allocate
from octavo.backends.cuda.placed import Placed
from octavo.backends.cuda.tensors import Matrix
from octavo.checkpoint import Checkpoint, TensorType
from octavo.checkpoint.base import Computed
from octavo.models import build_program


class Shape(NamedTuple):
    """Of a llama: width, feed-forward width, layers, heads, KV heads, vocabulary."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SHAPES = {
    "tiny": Shape(64, 96, 2, 4, 2, 320),
    "llama-1b": Shape(2048, 8192, 16, 32, 8, 128_256),
    "llama-8b": Shape(4096, 14336, 32, 32, 8, 128_256),
}
FORMATS = {"bf16": TensorType.BF16, "q4_0": TensorType.Q4_0, "q8_0": TensorType.Q8_0}


def checkpoint_of(s: Shape, format: str) -> Checkpoint:
    """A llama without a file: vectors are ones, matrices are never read."""
    shapes = {
        "model.embed_tokens.weight": (s.vocabulary, s.hidden),
        "model.norm.weight": (s.hidden,),
    }
    for i in range(s.layers):
        at = f"model.layers.{i}."
        keys = s.kv_heads * s.head_dim
        shapes |= {
            f"{at}input_layernorm.weight": (s.hidden,),
            f"{at}post_attention_layernorm.weight": (s.hidden,),
            f"{at}self_attn.q_proj.weight": (s.hidden, s.hidden),
            f"{at}self_attn.k_proj.weight": (keys, s.hidden),
            f"{at}self_attn.v_proj.weight": (keys, s.hidden),
            f"{at}self_attn.o_proj.weight": (s.hidden, s.hidden),
            f"{at}mlp.gate_proj.weight": (s.ffn, s.hidden),
            f"{at}mlp.up_proj.weight": (s.ffn, s.hidden),
            f"{at}mlp.down_proj.weight": (s.hidden, s.ffn),
        }
    tensors = {}
    for name, shape in shapes.items():
        kind = TensorType.F32 if len(shape) == 1 else FORMATS[format]
        ones = shape if len(shape) == 1 else (0,)
        tensors[name] = Computed(name, kind, shape, 0, partial(np.ones, ones, np.float32))
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": s.hidden,
        "intermediate_size": s.ffn, "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads, "num_key_value_heads": s.kv_heads,
        "vocab_size": s.vocabulary, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0, "tie_word_embeddings": True, "hidden_act": "silu",
    }  # fmt: skip
    return Checkpoint(Path("random"), "hf", config, tensors)


def random_matrix(spec: MatrixSpec, device: torch.device) -> Matrix:
    """Weights that keep the scale of what passes through them, made on the device."""
    arrays = {name: allocate(array, device) for name, array in spec.arrays.items()}
    codes, n, k = arrays["codes"], spec.n, spec.k
    deviation = k**-0.5
    if spec.form.kind == "bf16":
        codes[:n, :k].normal_(0, deviation)
    else:
        codes.random_(0, 256)
        middle = 4.6 if spec.form.kind == "int4" else 74.0  # deviation of even codes
        arrays["scales"][: -(-k // spec.form.group), :n] = deviation / middle
    return Matrix(spec.form.kind, n, k, spec.form.group, **arrays)


class Model:
    """A random model on a device."""

    def __init__(self, name: str, format: str, device: torch.device, blocks: int) -> None:
        self.shape, self.device = SHAPES[name], device
        torch.manual_seed(1)
        program = build_program(checkpoint_of(self.shape, format))
        self.memory = DeviceMemory(lower(program), StepLimits(self.most, 256, blocks))
        placed = Placed(self.memory, device, lambda _: None, random_matrix)
        self.executable = CudaExecutable(placed, device.type)
        self.weights = self.memory.footprint.weights
        self.token = self.memory.cache.nbytes // blocks // BLOCK  # bytes of KV of a token

    @property
    def most(self) -> int:
        return 1024 if self.shape.hidden < 256 else 2048

    def step(self, spans: list[tuple[list[int], int, list[int]]]) -> StepInput:
        """Tokens, their first position and their blocks, of several sequences; the last row of
        each is drawn greedily."""
        ids: list[int] = []
        positions: list[int] = []
        tables: list[int] = []
        layout = []
        for tokens, start, blocks in spans:
            layout.append(Span(len(ids), len(tokens), start, len(tables)))
            ids += tokens
            positions += range(start, start + len(tokens))
            tables += blocks
        last = [s.first + s.length - 1 for s in layout]
        a = (np.array(x, np.int32) for x in (ids, positions, tables, last))
        given, at, table, select = a
        rows = [SamplingRow()] * len(spans)
        return StepInput(given, at, layout, table, select, rows, all_logits=True)

    def blocks(self, sequence: int, length: int) -> list[int]:
        """Blocks of a sequence of so many tokens; of all sequences one after the other."""
        each = -(-length // BLOCK)
        return list(range(sequence * each, (sequence + 1) * each))

    def ids(self, seed: int, count: int) -> list[int]:
        found: list[int] = (
            np.random.default_rng(seed).integers(3, self.shape.vocabulary, count).tolist()
        )
        return found


def seconds(device: torch.device, work: Callable[[], object], rounds: int = 20) -> float:
    """Median seconds of a piece of work, after three that do not count."""
    taken = []
    for i in range(rounds + 3):
        wait(device)
        begin = time.perf_counter()
        work()
        wait(device)
        taken += [time.perf_counter() - begin] * (i >= 3)
    return statistics.median(taken)
