"""Measures what making a model smaller has cost: the model A against B, which it was made from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from octavo.backends.base import Ints
from octavo.checkpoint.hub import locate, no_progress
from octavo.checkpoint.progress import ProgressBar
from octavo.compress.data import described, split, token_blocks
from octavo.compress.distributions import Distances, Precision, Scorer, compare, rows_at_once
from octavo.compress.evaluation import (
    Evaluation,
    Pair,
    Worst,
    distances,
    fingerprint,
    weight_bytes,
)
from octavo.compress.serving import serve_both
from octavo.compress.similarity import bleu4, bleu4_error, rouge_l, sacrebleu
from octavo.engine.host import usable_threads
from octavo.engine.open import OpenModel, open_model
from octavo.errors import UsageError
from octavo.generate.load import check_choices
from octavo.text import Tokenizer, load_tokenizer

TOKENS = 16_384
LENGTH = 512
OUTPUTS, OUTPUT = 32, 64  # texts that both continue at most, and by how many tokens
FEW, SHORT = 8, 32  # blocks are halved, down to 32 tokens, until there are 8
WORST, BEFORE = 20, 24  # tokens to show, and how many before each


def evaluate(
    model: str,
    *,
    against: str,
    data: str | Path | None = None,
    tokens: int = TOKENS,
    length: int = LENGTH,
    threads: int | None = None,
    activations: str = "auto",
    kv_dtype: str = "auto",
    offline: bool = False,
    progress: ProgressBar = no_progress,
) -> Evaluation:
    """Measures `model` (demo name, Hugging Face id, folder or .gguf) against the one it was made
    from, over the same text.

    data: a text file, .jsonl or folder of them, of which the part is used that `quantize` does not
    calibrate with; "self" for what `against` writes; Python's manual by default. tokens: how many
    of it, in blocks of `length`, or shorter ones where it is short. activations, kv_dtype: what
    `model` computes with, as when it is served; `against` computes with what it does by default.
    progress: opens a bar, given
    what for and how many steps. Raises OctavoError.
    """
    sacrebleu()
    check_choices({"activations": activations, "kv_dtype": kv_dtype})
    if tokens < FEW * SHORT or length < SHORT:
        raise UsageError(
            f"{tokens:,} tokens in blocks of {length:,} are too few; {FEW * SHORT} in blocks of "
            f"{SHORT} are the least"
        )
    located = locate(model, offline=offline), locate(against, offline=offline)
    a, b = (open_model(found.path) for found in located)
    _check(a, b)
    text = None if data is None else Path(data)
    blocks, tokenizer = _blocks(a, b, split("evaluation", text, located[1].path), tokens, length)
    precision = Precision(activations, kv_dtype)
    found = _distances(a, b, blocks, threads or usable_threads(), precision, progress)
    prompts = _prompts(blocks)
    output = min(OUTPUT, len(prompts[0]))
    with progress("Continuing", len(prompts)) as advance:
        served = serve_both((a, b), prompts, output, threads, precision, advance)
    x, y = served
    outputs, references = ([tokenizer.decode(ids) for ids in s.outputs] for s in served)
    return Evaluation(
        model=located[0].name, weights=fingerprint(a.checkpoint), against=located[1].name,
        data=described(text), activations=a.compiled.activations(activations),
        kv_dtype=a.compiled.kv_dtype(kv_dtype),
        outputs=len(outputs), bleu4=bleu4(outputs, references),
        bleu4_error=bleu4_error(outputs, references), rouge_l=rouge_l(outputs, references),
        identical=sum(map(list.__eq__, x.outputs, y.outputs)) / len(prompts),
        bytes=Pair(weight_bytes(a.checkpoint), weight_bytes(b.checkpoint)),
        load_seconds=Pair(x.load_seconds, y.load_seconds),
        prefill_tps=Pair(x.prefill_tps, y.prefill_tps),
        decode_tps=Pair(x.decode_tps, y.decode_tps),
        peak_rss=Pair(x.peak_rss, y.peak_rss),
        worst=tuple(_worst(found, blocks, tokenizer)), **distances(found),
    )  # fmt: skip


def _check(a: OpenModel, b: OpenModel) -> None:
    """Raises UsageError for models that cannot be compared."""
    for m in (a, b):
        if m.task != "generate":
            raise UsageError(f"{m.checkpoint.path.name} generates no text, so it is not measured")
        if m.program.context < SHORT:
            raise UsageError(
                f"{m.checkpoint.path.name} has a context of {m.program.context} tokens; "
                f"{SHORT} are needed"
            )
    if a.vocabulary != b.vocabulary:
        raise UsageError(
            f"{a.checkpoint.path.name} has a vocabulary of {a.vocabulary:,} tokens, "
            f"{b.checkpoint.path.name} of {b.vocabulary:,}: their distributions cannot be compared"
        )


def _blocks(
    a: OpenModel, b: OpenModel, texts: list[str], tokens: int, length: int
) -> tuple[Ints, Tokenizer]:
    """Blocks of tokens, the same for both models, and B's tokenizer. Raises UsageError."""
    first, second = (load_tokenizer(m.checkpoint) for m in (a, b))
    short = token_blocks(texts, second, SHORT, tokens // SHORT)
    if len(short) < FEW:
        raise UsageError(f"the text has {short.size:,} tokens; {FEW * SHORT:,} are needed")
    length = min(length, a.program.context, b.program.context, short.size // FEW)
    blocks = token_blocks(texts, second, length, tokens // length)
    if not np.array_equal(blocks, token_blocks(texts, first, length, tokens // length)):
        raise UsageError(
            f"{a.checkpoint.path.name} makes other tokens of the same text than "
            f"{b.checkpoint.path.name}: their distributions cannot be compared"
        )
    return blocks, second


def _distances(
    a: OpenModel, b: OpenModel, blocks: Ints, threads: int, precision: Precision,
    progress: ProgressBar,
) -> Distances:  # fmt: skip
    """Has both models in memory, and neither when it returns."""
    rows, length = rows_at_once(b.vocabulary), blocks.shape[1]
    first = Scorer(a, rows, length, threads, precision)
    second = Scorer(b, rows, length, threads, Precision())
    with progress("Comparing", len(blocks)) as advance:
        return compare(first, second, blocks, rows, advance)


def _prompts(blocks: Ints) -> list[list[int]]:
    """Up to OUTPUTS halves of blocks, evenly; FEW blocks have 16."""
    half = blocks.shape[1] // 2
    halves = blocks[:, : 2 * half].reshape(-1, half)
    count = min(len(halves), OUTPUTS)
    return [halves[k * len(halves) // count].tolist() for k in range(count)]


def _worst(found: Distances, blocks: Ints, tokenizer: Tokenizer) -> Iterator[Worst]:
    """The tokens with the highest KL, with what stands before them."""
    for at in np.argsort(-found.kl, axis=None, kind="stable")[:WORST]:
        block, row = divmod(int(at), found.kl.shape[1])
        ids = blocks[block].tolist()
        before = tokenizer.decode(ids[max(0, row + 1 - BEFORE) : row + 1])
        nll = Pair(float(found.nll_a[block, row]), float(found.nll_b[block, row]))
        kl, token = float(found.kl[block, row]), tokenizer.decode([ids[row + 1]])
        yield Worst(block, row + 1, kl, before, token, nll)
