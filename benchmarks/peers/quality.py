"""How far logits are from those of fp32. Needs numpy only, which every peer has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROWS = 64  # at a time: a vocabulary in doubles is large


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x


@dataclass(frozen=True)
class Quality:
    """Sums over tokens: Kullback-Leibler divergence from the reference, how often both find the same
    token most likely, losses of the reference and of what is measured."""

    tokens: int = 0
    predicted: int = 0
    divergence: float = 0.0
    same: int = 0
    reference_loss: float = 0.0
    loss: float = 0.0

    def add(self, expected: np.ndarray, got: np.ndarray, ids: list[int]) -> Quality:
        """With one document: logits of all its tokens."""
        divergence, same, losses = 0.0, 0, np.zeros(2)
        for at in range(0, len(ids), ROWS):
            p, q = (log_softmax(x[at : at + ROWS]) for x in (expected, got))
            divergence += float((np.exp(p) * (p - q)).sum())
            same += int((p.argmax(-1) == q.argmax(-1)).sum())
            following = ids[at + 1 : at + 1 + ROWS]
            row = np.arange(len(following))
            losses -= [x[row, following].sum() for x in (p, q)]
        return Quality(
            self.tokens + len(ids), self.predicted + len(ids) - 1, self.divergence + divergence,
            self.same + same, self.reference_loss + losses[0], self.loss + losses[1],
        )  # fmt: skip

    def figures(self) -> dict[str, float]:
        return {
            "tokens": self.tokens,
            "kl": self.divergence / self.tokens,
            "top1": self.same / self.tokens,
            "perplexity": float(np.exp(self.loss / self.predicted)),
            "reference_perplexity": float(np.exp(self.reference_loss / self.predicted)),
        }


def save(folder: Path, index: int, ids: list[int], logits: np.ndarray) -> None:
    """Keeps the reference's logits of a document."""
    np.savez(folder / f"{index}.npz", ids=np.array(ids, np.int32), logits=logits)


def measure(logits: Callable[[list[int]], np.ndarray], folder: Path) -> dict[str, float]:
    """Holds `logits` of each document against what `save` kept."""
    found = Quality()
    for file in sorted(folder.glob("*.npz")):
        with np.load(file) as kept:
            ids, expected = kept["ids"].tolist(), kept["logits"]
        found = found.add(expected, logits(ids), ids)
    return found.figures()
