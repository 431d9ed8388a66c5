"""A llama of PyTorch's own operations (cuBLAS, its attention, one CUDA graph), to compare with.

    python benchmarks/gpu_baseline.py 4096,14336,32,32,8,128256 --batches 1,64 --context 1024

The shape is width, feed-forward width, layers, heads, KV heads, vocabulary; weights are random and
bf16. Every sequence has its keys and values in one piece, nothing is scheduled, and tokens are drawn
greedily: what a program for one model and one batch can reach. Prints a JSON line for each speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn import functional as F

EPSILON = 1e-5
BASE = 500_000.0  # of the rotation


class Llama:
    """Its weights, and room for keys and values of a batch: [layers, 2, batch, kv heads, length, head]."""

    def __init__(self, shape: list[int], batch: int, length: int, device: torch.device) -> None:
        self.width, self.ffn, self.layers, self.heads, self.kv_heads, self.vocabulary = shape
        self.head = self.width // self.heads
        self.batch, self.device = batch, device
        keys = self.kv_heads * self.head
        self.embedding = self._matrix(self.vocabulary, self.width)
        self.norm = torch.ones(self.width, dtype=torch.bfloat16, device=device)
        self.parts = [
            {
                "qkv": self._matrix(self.width + 2 * keys, self.width),
                "out": self._matrix(self.width, self.width),
                "gate_up": self._matrix(2 * self.ffn, self.width),
                "down": self._matrix(self.width, self.ffn),
            }
            for _ in range(self.layers)
        ]
        room = (self.layers, 2, batch, self.kv_heads, length, self.head)
        self.cache = torch.randn(room, device=device, dtype=torch.bfloat16)
        powers = torch.arange(0, self.head, 2, device=device) / self.head
        angles = torch.arange(length, device=device)[:, None] / BASE ** powers[None]
        self.turns = torch.polar(torch.ones_like(angles), angles)  # [length, head / 2]

    def _matrix(self, n: int, k: int) -> torch.Tensor:
        made = torch.empty(n, k, device=self.device, dtype=torch.bfloat16)
        return made.normal_(0, k**-0.5)

    def _rotated(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """x [batch, heads, tokens, head], from a position on."""
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        turned = pairs * self.turns[first : first + x.shape[2]]
        return torch.view_as_real(turned).flatten(-2).to(x.dtype)

    def step(self, ids: torch.Tensor, first: int) -> torch.Tensor:
        """The likeliest tokens [batch] after ids [batch, tokens] at positions from `first` on."""
        batch, count = ids.shape
        x = self.embedding[ids]
        for part, cache in zip(self.parts, self.cache, strict=True):
            normed = F.rms_norm(x, (self.width,), self.norm, EPSILON)
            heads = (normed @ part["qkv"].T).view(batch, count, -1, self.head).transpose(1, 2)
            q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], 1)
            keys, values = cache[:, :batch]
            keys[:, :, first : first + count] = self._rotated(k, first)
            values[:, :, first : first + count] = v
            seen = [c[:, :, : first + count] for c in (keys, values)]
            mixed = F.scaled_dot_product_attention(
                self._rotated(q, first), *seen, is_causal=count > 1, enable_gqa=True
            )
            x = x + mixed.transpose(1, 2).reshape(batch, count, -1) @ part["out"].T
            normed = F.rms_norm(x, (self.width,), self.norm, EPSILON)
            gate, up = (normed @ part["gate_up"].T).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ part["down"].T
        last = F.rms_norm(x[:, -1], (self.width,), self.norm, EPSILON)
        return (last @ self.embedding.T).argmax(-1)


def replayed(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Work as a CUDA graph; itself on a CPU."""
    if device.type != "cuda":
        return work
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    replay: Callable[[], object] = graph.replay
    return replay


def median_seconds(work: Callable[[], object], rounds: int, device: torch.device) -> float:
    """Of a piece of work, after three rounds that do not count."""
    taken = []
    for _ in range(rounds + 3):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[3:])


@torch.inference_mode()
def speeds(
    shape: list[int], batches: list[int], context: int, prompts: list[int], device: torch.device
) -> Iterator[dict[str, object]]:
    """Lines of decoding for each batch, and of a prompt for each length."""
    model = Llama(shape, max(batches), max(context + 1, *prompts), device)
    for batch in batches:
        ids = torch.randint(model.vocabulary, (batch, 1), device=device)
        took = median_seconds(replayed(partial(model.step, ids, context), device), 20, device)
        yield {
            "item": "baseline decode", "batch": batch, "context": context,
            "ms": took * 1e3, "tokens_per_second": batch / took,
        }  # fmt: skip
    for length in prompts:
        ids = torch.randint(model.vocabulary, (1, length), device=device)
        took = median_seconds(partial(model.step, ids, 0), 5, device)
        yield {
            "item": "baseline prefill", "tokens": length,
            "ms": took * 1e3, "tokens_per_second": length / took,
        }  # fmt: skip


def _numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", type=_numbers)
    parser.add_argument("--batches", type=_numbers, default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompts", type=_numbers, default=[512, 2048])
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda:0"))
    a = parser.parse_args()
    for line in speeds(a.shape, a.batches, a.context, a.prompts, a.device):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
