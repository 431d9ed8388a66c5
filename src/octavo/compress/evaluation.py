"""What an evaluation found: figures of a model A beside the model B that it was made from."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from octavo.checkpoint import Checkpoint
from octavo.checkpoint.files import read_json
from octavo.checkpoint.writer import replacing
from octavo.compress.distributions import Distances, Doubles
from octavo.errors import CheckpointError

MAX_QUALITY = 1 << 20  # bytes of a quality.json
SAMPLES, SAMPLE = 64, 4096  # of a file: how many, and bytes of each
KL_EDGES = tuple(10 ** (i / 4) for i in range(-24, 6))


@dataclass(frozen=True)
class Pair:
    """The same figure of both models."""

    a: float
    b: float


@dataclass(frozen=True)
class Paired:
    """A mean of both models over the same text. standard_error: of the difference a - b, as the
    differences of the blocks of text scatter."""

    a: float
    b: float
    difference: float
    standard_error: float


@dataclass(frozen=True)
class Choices:
    """Multiple choice: which of four continuations is likelier. agreement: share of items of which
    both choose the same; a, b: shares of which each chooses the text's own."""

    items: int
    agreement: float
    a: float
    b: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of an evaluation of A against B, as JSON names them.

    weights: what A's files are known by. data: the text; tokens: how many of it were predicted, in
    `blocks` blocks of `length`. nll: nats a token. kl_mean, kl_p99: of KL(B || A), nats a token.
    top1: share of tokens of which both find the same likeliest. bleu4 (0 to 100), rouge_l (0 to 1):
    of A's greedy outputs against B's, `outputs` of each; bleu4_error: the standard error, by the
    jackknife over outputs; identical: share of them that are the same. bytes: of the files with
    weights. peak_rss: bytes. activations, kv_dtype: what A computed with.
    """

    model: str
    weights: str
    against: str
    data: str
    tokens: int
    blocks: int
    length: int
    perplexity: Paired
    nll: Paired
    kl_mean: float
    kl_p99: float
    kl_max: float
    top1: float
    outputs: int
    bleu4: float
    bleu4_error: float
    rouge_l: float
    identical: float
    choices: Choices
    bytes: Pair
    load_seconds: Pair
    prefill_tps: Pair
    decode_tps: Pair
    peak_rss: Pair
    activations: str = "auto"
    kv_dtype: str = "auto"


@dataclass(frozen=True)
class Worst:
    """A token of the text at which the distributions are far apart: what came before it, itself,
    and what each model expected."""

    block: int
    position: int
    kl: float
    before: str
    token: str
    nll: Pair


@dataclass(frozen=True, kw_only=True)
class Evaluation(Summary):
    """The figures, and what they were computed from.

    block_nll: the mean of each block. kl_histogram: how many tokens have a KL below each of
    KL_EDGES but not below the one before, and how many have none below the last. worst: the tokens
    with the highest KL, the highest first.
    """

    block_nll: tuple[Pair, ...]
    kl_histogram: tuple[int, ...]
    worst: tuple[Worst, ...]

    @property
    def summary(self) -> Summary:
        """The figures alone, without any of the text."""
        return Summary(**{f.name: getattr(self, f.name) for f in fields(Summary)})


def paired(a: Doubles, b: Doubles) -> tuple[Paired, Paired]:
    """Perplexity and NLL of two models, of what the same tokens cost each, `[blocks, tokens]`.

    The standard error of the NLL's difference is that of the blocks' mean. The perplexity's follows
    from it to the first order: d(exp x) = exp(x) dx.
    """
    blocks_a, blocks_b = a.mean(1), b.mean(1)
    x, y = float(blocks_a.mean()), float(blocks_b.mean())
    p, q = math.exp(min(x, 700.0)), math.exp(min(y, 700.0))
    of_nll = _standard_error(blocks_a - blocks_b)
    of_perplexity = _standard_error(p * blocks_a - q * blocks_b)
    return Paired(p, q, p - q, of_perplexity), Paired(x, y, x - y, of_nll)


def _standard_error(values: Doubles) -> float:
    """Of a mean of two values or more."""
    return float(values.std(ddof=1) / math.sqrt(len(values)))


def choices(scores: Doubles) -> Choices:
    """Of log-probabilities `[items, choices, models]`, the right choice first."""
    picked = scores.argmax(1)
    right = (picked == 0).mean(0)
    same = float((picked[:, 0] == picked[:, 1]).mean())
    return Choices(len(scores), same, float(right[0]), float(right[1]))


def distances(found: Distances) -> dict[str, Any]:
    """The fields of an Evaluation that the distributions tell."""
    perplexity, nll = paired(found.nll_a, found.nll_b)
    bins = np.digitize(found.kl.ravel(), KL_EDGES)
    return {
        "tokens": found.kl.size, "blocks": found.kl.shape[0], "length": found.kl.shape[1] + 1,
        "perplexity": perplexity, "nll": nll,
        "kl_mean": float(found.kl.mean()), "kl_p99": float(np.quantile(found.kl, 0.99)),
        "kl_max": float(found.kl.max()), "top1": float(found.same.mean()),
        "choices": choices(found.choices),
        "block_nll": tuple(map(Pair, found.nll_a.mean(1).tolist(), found.nll_b.mean(1).tolist())),
        "kl_histogram": tuple(np.bincount(bins, minlength=len(KL_EDGES) + 1).tolist()),
    }  # fmt: skip


# -- bounds -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bounds:
    """What an evaluation has to keep; None: no bound. max_perplexity: percent above B's."""

    max_kl: float | None = None
    max_kl_p99: float | None = None
    max_perplexity: float | None = None
    min_top1: float | None = None
    min_bleu4: float | None = None
    min_choices: float | None = None

    def broken(self, e: Summary) -> list[str]:
        """A line for each bound that is broken."""
        increase = 100 * (e.perplexity.a / e.perplexity.b - 1)
        found = {
            "max_kl": e.kl_mean, "max_kl_p99": e.kl_p99, "max_perplexity": increase,
            "min_top1": e.top1, "min_bleu4": e.bleu4, "min_choices": e.choices.agreement,
        }  # fmt: skip
        return [
            f"{_NAMES[name]} is {value:.6g}, {'above' if name[:3] == 'max' else 'below'} "
            f"the bound of {bound:g}"
            for name, value in found.items()
            if (bound := getattr(self, name)) is not None
            and (value > bound if name[:3] == "max" else value < bound)
        ]


_NAMES = {
    "max_kl": "mean KL", "max_kl_p99": "99th percentile of KL",
    "max_perplexity": "increase of perplexity in percent", "min_top1": "same top-1",
    "min_bleu4": "BLEU-4", "min_choices": "agreement on choices",
}  # fmt: skip


# -- quality.json -------------------------------------------------------------------------------


def quality_file(model: Path) -> Path:
    """Where a model's quality is kept: quality.json in its folder, or beside a file."""
    return (
        model / "quality.json" if model.is_dir() else model.with_name(f"{model.name}.quality.json")
    )


def fingerprint(checkpoint: Checkpoint) -> str:
    """A digest of samples of the files that hold weights, which rounding them otherwise changes."""
    digest = sha256()
    for source in checkpoint.sources:
        size = source.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with source.open("rb") as file:
            for i in range(SAMPLES):
                file.seek(i * size // SAMPLES)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()[:32]


def weight_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of the files that hold weights."""
    return sum(source.stat().st_size for source in checkpoint.sources)


def to_json(value: Summary) -> bytes:
    """An Evaluation or a Summary as JSON."""
    return json.dumps(asdict(value), indent=1, allow_nan=False).encode() + b"\n"


def save(e: Evaluation, checkpoint: Checkpoint) -> Path:
    """Writes the figures beside a model's weights, and says where. Raises WriteError."""
    with replacing(file := quality_file(checkpoint.path)) as out:
        out.write(to_json(e.summary))
    return file


def read_quality(checkpoint: Checkpoint) -> Summary | None:
    """The figures that lie beside a model's weights; None if none do.

    Raises CheckpointError for a file of that name that holds something else, or figures of weights
    that were there before.
    """
    file = quality_file(checkpoint.path)
    if not file.exists():
        return None
    try:
        found = msgspec.convert(read_json(file, MAX_QUALITY), Summary)
    except msgspec.ValidationError:
        raise CheckpointError(f"{file.name} is none of octavo evaluate's") from None
    if found.weights != fingerprint(checkpoint):
        raise CheckpointError(f"{file.name} is of other weights than these")
    return found
