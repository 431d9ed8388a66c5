"""What rounding costs: a model's logits on this host against fp32, for each setting.

    python benchmarks/precision.py smollm2 --tokens 5120
    python benchmarks/precision.py model.gguf --activations int8 --kv-dtype f32

Mean Kullback-Leibler divergence from the torch reference, how often both find the same token most
likely, and perplexities, on the reference manual that every Python carries, in documents of 512
tokens. Needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import click
import numpy as np
import torch

from octavo.backends import get_backend
from octavo.backends.base import BLOCK, Executable, Limits, LoadOptions, Span, StepInput
from octavo.backends.torch.reference import Reference
from octavo.checkpoint import Checkpoint, open_checkpoint
from octavo.checkpoint.hub import locate
from octavo.engine.plan import cache_type
from octavo.models import build_program
from octavo.text import load_tokenizer

DOCUMENT = 512


@dataclass(frozen=True)
class Quality:
    """Sums over tokens: divergence, agreements, losses of the reference and of the setting."""

    divergence: float = 0.0
    same: int = 0
    reference_loss: float = 0.0
    loss: float = 0.0

    def add(self, expected: torch.Tensor, got: np.ndarray, ids: list[int]) -> Quality:
        p, q = expected.log_softmax(-1), torch.from_numpy(got).log_softmax(-1)
        following = torch.tensor(ids[1:])[:, None]
        first, second = (-x[:-1].gather(1, following).sum().item() for x in (p, q))
        return Quality(
            self.divergence + (p.exp() * (p - q)).sum().item(),
            self.same + int((p.argmax(-1) == q.argmax(-1)).sum()),
            self.reference_loss + first,
            self.loss + second,
        )


def documents(checkpoint: Checkpoint, tokens: int) -> list[list[int]]:
    """Whole documents with at least so many tokens together."""
    tokenizer = load_tokenizer(checkpoint)
    first = [tokenizer.special.bos] if tokenizer.special.add_bos else []
    text = "\n\n".join(topics[k] for k in sorted(topics))
    ids = tokenizer.encode(text[: 12 * (tokens + DOCUMENT)], add_bos=False)
    length, count = DOCUMENT - len(first), -(-tokens // DOCUMENT)
    found = [first + ids[i * length : (i + 1) * length] for i in range(count)]
    if len(found[-1]) < DOCUMENT:
        raise click.UsageError(f"the text has fewer than {tokens} tokens")
    return found


def logits(executable: Executable, ids: list[int]) -> np.ndarray:
    """Of every token of one sequence."""
    n = len(ids)
    rows = np.arange(n, dtype=np.int32)
    blocks = np.arange(-(-n // BLOCK), dtype=np.int32)
    executable.step(StepInput(np.array(ids, np.int32), rows, [Span(0, n, 0, 0)], blocks, rows))
    return executable.logits(n)


@click.command()
@click.argument("model")
@click.option("--tokens", default=5120, show_default=True)
@click.option("--activations", default="auto,int8,int16", show_default=True)
@click.option("--kv-dtype", default="auto", show_default=True)
@click.option("--threads", default=2, show_default=True)
def main(model: str, tokens: int, activations: str, kv_dtype: str, threads: int) -> None:
    path = Path(model) if Path(model).exists() else locate(model).path
    checkpoint = open_checkpoint(path)
    program = build_program(checkpoint)
    texts, reference = documents(checkpoint, tokens), Reference(program)
    limits = Limits(DOCUMENT, DOCUMENT, DOCUMENT // BLOCK)
    found: dict[str, Quality] = {}
    runs: dict[str, Executable] = {}
    for setting in activations.split(","):
        compiled = get_backend().compile(program)
        options = LoadOptions(
            limits, threads, cache_type(program, kv_dtype),
            activations=compiled.activations(setting),
        )  # fmt: skip
        found[setting], runs[setting] = Quality(), compiled.load(checkpoint, options)
    for ids in texts:
        expected = reference.logits(ids)
        for setting, executable in runs.items():
            found[setting] = found[setting].add(expected, logits(executable, ids), ids)
    n, predicted = len(texts) * DOCUMENT, len(texts) * (DOCUMENT - 1)
    for setting, q in found.items():
        before, after = (np.exp(x / predicted) for x in (q.reference_loss, q.loss))
        click.echo(
            f"{setting:6} {n} tokens: KL {q.divergence / n:.2e}, top-1 {100 * q.same / n:.2f} %, "
            f"perplexity {after:.4f}, of fp32 {before:.4f}"
        )


if __name__ == "__main__":
    main()
