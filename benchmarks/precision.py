"""What rounding costs: a model's logits on this host against fp32, for each setting.

    python benchmarks/precision.py smollm2 --tokens 5120
    python benchmarks/precision.py model.gguf --activations int8 --kv-dtype f32

Mean Kullback-Leibler divergence from the torch reference, how often both find the same token most
likely, and perplexities, on the reference manual that every Python carries, in documents of 512
tokens. Needs torch.
"""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

import click
import numpy as np
from peers.quality import Quality, save

from octavo.backends import get_backend
from octavo.backends.base import BLOCK, Executable, ProgramOptions, Span, StepInput, StepLimits
from octavo.checkpoint import Checkpoint, open_checkpoint
from octavo.checkpoint.hub import locate
from octavo.models import build_program
from octavo.text import load_tokenizer

DOCUMENT = 512


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


def load(checkpoint: Checkpoint, activations: str, kv_dtype: str, threads: int) -> Executable:
    """With room for one document."""
    program = build_program(checkpoint)
    compiled = get_backend().compile(program)
    options = ProgramOptions(
        StepLimits(DOCUMENT, DOCUMENT, DOCUMENT // BLOCK), threads, compiled.kv_dtype(kv_dtype),
        activations=compiled.activations(activations),
    )  # fmt: skip
    return compiled.load(checkpoint, options)


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
@click.option(
    "--save", "folder", type=click.Path(path_type=Path),
    help="Only keep fp32's logits in this folder, as compare.py reads them.",
)  # fmt: skip
def main(
    model: str, tokens: int, activations: str, kv_dtype: str, threads: int, folder: Path | None
) -> None:
    from octavo.backends.torch.reference import Reference

    path = Path(model) if Path(model).exists() else locate(model).path
    checkpoint = open_checkpoint(path)
    texts, reference = documents(checkpoint, tokens), Reference(build_program(checkpoint))
    if folder is not None:
        for i, ids in enumerate(texts):
            save(folder, i, ids, reference.logits(ids).numpy())
        return
    settings = activations.split(",")
    runs = {s: load(checkpoint, s, kv_dtype, threads) for s in settings}
    found = dict.fromkeys(settings, Quality())
    for ids in texts:
        expected = reference.logits(ids).numpy()
        for s, executable in runs.items():
            found[s] = found[s].add(expected, logits(executable, ids), ids)
    for s, quality in found.items():
        q = quality.figures()
        click.echo(
            f"{s:6} {quality.tokens} tokens: KL {q['kl']:.2e}, top-1 {100 * q['top1']:.2f} %, "
            f"perplexity {q['perplexity']:.4f}, of fp32 {q['reference_perplexity']:.4f}"
        )


if __name__ == "__main__":
    main()
