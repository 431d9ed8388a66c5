"""A pair of random models, one ten times as large as the other, of which the small one drafts well.

The small one is random. The large one is the small one widened: each feature, head and hidden unit
is there three times, with a third of the weights that lead to it, so its layers compute the same.
More layers follow whose outputs are scaled down, so that the two differ now and then. What a step
takes does not depend on the weights' values, so the pair shows what a draft model of its size saves
if it is right as often as this one.

    python -m tests.draft_pair FOLDER [--noise X]
    octavo bench speculation FOLDER/large.gguf --draft FOLDER/small.gguf --speculation draft
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Q

from tests.small_models import Small, llama_writer

WIDER = 3
SMALL = Small(heads=10, kv_heads=5, head_dim=64, hidden=640, ffn=2560, layers=10, vocabulary=49152)
LAYERS = 16  # of the large one
NOISE = 0.02  # scale of what its further layers add

F32 = npt.NDArray[np.float32]


@dataclass
class _Writer:
    """Tensors of both files: `wide` of the large one."""

    small: gguf.GGUFWriter
    large: gguf.GGUFWriter
    quant: Q

    def matrix(self, name: str, x: F32, wider: tuple[int, int] = (WIDER, WIDER)) -> None:
        """One of the small model, and as often as `wider` says along rows and columns, divided by
        the columns', in the large one."""
        self._add(self.small, name, x)
        self._add(self.large, name, x / wider[1], wider)

    def vector(self, name: str, x: F32) -> None:
        self.small.add_tensor(name, x)
        self.large.add_tensor(name, np.tile(x, WIDER))

    def _add(
        self, file: gguf.GGUFWriter, name: str, x: F32, times: tuple[int, int] = (1, 1)
    ) -> None:
        blocks = gguf.quants.quantize(x, self.quant)  # of rows: blocks of a row follow each other
        file.add_tensor(name, np.tile(blocks, times), raw_dtype=self.quant)

    def more(self, name: str, x: F32) -> None:
        """One of the large model alone."""
        self._add(self.large, name, x / WIDER, (WIDER, WIDER))


def write_pair(
    folder: Path, shape: Small = SMALL, layers: int = LAYERS, noise: float = NOISE,
    quant: Q = Q.Q4_0,
) -> None:  # fmt: skip
    """Writes small.gguf and large.gguf."""
    rng = np.random.default_rng(5)
    wide = replace(
        shape, heads=WIDER * shape.heads, kv_heads=WIDER * shape.kv_heads,
        hidden=WIDER * shape.hidden, ffn=WIDER * shape.ffn, layers=layers,
    )  # fmt: skip
    files = [
        llama_writer(s, folder / f"{n}.gguf", 1e-5) for s, n in ((shape, "small"), (wide, "large"))
    ]
    w = _Writer(*files, quant)

    def random(rows: int, cols: int, scale: float = 1.0) -> F32:
        return (scale * rng.standard_normal((rows, cols)) / cols**0.5).astype(np.float32)

    table = random(shape.vocabulary, shape.hidden, 4.0)
    w._add(w.small, "token_embd.weight", table)
    w._add(w.large, "token_embd.weight", table, (1, WIDER))
    w.matrix("output.weight", random(shape.vocabulary, shape.hidden, 4.0), (1, WIDER))
    w.vector("output_norm.weight", np.ones(shape.hidden, np.float32))
    for i in range(layers):
        if i < shape.layers:
            _layer(i, shape, w.matrix, w.vector, random, 1.0)
        else:
            _layer(
                i,
                shape,
                w.more,
                lambda name, x: w.large.add_tensor(name, np.tile(x, WIDER)),
                random,
                noise,
            )
    for file in files:
        file.write_header_to_file()
        file.write_kv_data_to_file()
        file.write_tensors_to_file()
        file.close()


def _layer(
    layer: int, s: Small, matrix: Callable[[str, F32], None], vector: Callable[[str, F32], None],
    random: Callable[..., F32], scale: float,
) -> None:  # fmt: skip
    """A layer whose outputs are scaled."""
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    for name in ("attn_norm", "ffn_norm"):
        vector(f"blk.{layer}.{name}.weight", np.ones(s.hidden, np.float32))
    for name, rows, cols, by in (
        ("attn_q", q, s.hidden, 1.0), ("attn_k", kv, s.hidden, 1.0), ("attn_v", kv, s.hidden, 1.0),
        ("attn_output", s.hidden, q, scale), ("ffn_gate", s.ffn, s.hidden, 1.0),
        ("ffn_up", s.ffn, s.hidden, 1.0), ("ffn_down", s.hidden, s.ffn, scale),
    ):  # fmt: skip
        matrix(f"blk.{layer}.{name}.weight", random(rows, cols, by))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--noise", type=float, default=NOISE)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    write_pair(given.folder, noise=given.noise)
