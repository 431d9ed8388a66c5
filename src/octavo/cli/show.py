"""octavo show."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from octavo.cli.options import json_flag, mmproj_option, model_argument, offline_option
from octavo.cli.screen import say, say_json, table

if TYPE_CHECKING:
    from octavo.checkpoint.hub import Located
    from octavo.compress.evaluation import Summary
    from octavo.engine.open import OpenModel
    from octavo.program import Task

TASKS = {"embed": "embeddings (/v1/embeddings)", "rank": "reranking (/v1/rerank)"}


@click.command()
@model_argument()
@click.option("--program", is_flag=True, help="List the operations of the forward pass.")
@offline_option
@mmproj_option
@json_flag
def show(model: str, program: bool, offline: bool, mmproj: str, as_json: bool) -> None:
    """Describe MODEL without loading it."""
    from octavo.checkpoint.hub import locate
    from octavo.compress.evaluation import read_quality
    from octavo.engine.open import open_model
    from octavo.errors import CheckpointError
    from octavo.program import listing

    located = locate(model, offline=offline)
    opened = open_model(located.path, mmproj=mmproj)
    if program:
        lines = listing(opened.program)
        if as_json:
            say_json({"name": located.name, "program": lines.splitlines()})
        else:
            say(lines)
        return
    record, reason = _record(located, opened), ""
    try:
        record = replace(record, quality=read_quality(opened.checkpoint))
    except CheckpointError as e:  # of somebody else: the model can be described without
        reason = str(e)
    if as_json:
        return say_json(asdict(record))
    rows = _rows(record)
    table([*rows, ("quality", reason)] if reason else rows)


@dataclass(frozen=True)
class _Record:
    """What is known of a model without loading it. The names are those of --json."""

    name: str
    path: str
    architecture: str
    task: Task
    parameters: int
    bytes: int
    tensors: dict[str, int]
    layers: int
    vocabulary: int
    context: int
    kv_heads: int
    head_dim: int
    kv_bytes_per_token: int
    chat_template: bool
    sampling: dict[str, float]
    images: bool = False
    mmproj: str | None = None
    quality: Summary | None = None


def _record(located: Located, opened: OpenModel) -> _Record:
    from octavo.checkpoint.sampling import RECOMMENDED
    from octavo.engine.defaults import default_params
    from octavo.engine.request import SamplingParams
    from octavo.text.chat import template_source

    checkpoint, p = opened.checkpoint, opened.program
    types = Counter(t.type.name for t in checkpoint.tensors.values())
    widest = max(p.cache, key=lambda layer: layer.kv_heads * layer.head_dim)
    values = sum(2 * layer.kv_heads * layer.head_dim for layer in p.cache)
    defaults, plain = default_params(checkpoint, located.sampling), SamplingParams()
    recommended = [n for n in RECOMMENDED if getattr(defaults, n) != getattr(plain, n)]
    return _Record(
        name=located.name,
        path=str(Path(checkpoint.path)),
        architecture=checkpoint.architecture,
        task=p.task,
        parameters=checkpoint.parameters,
        bytes=checkpoint.nbytes,
        tensors=dict(types.most_common()),
        layers=len(p.cache),
        vocabulary=p.vocabulary,
        context=p.context,
        kv_heads=widest.kv_heads,
        head_dim=widest.head_dim,
        kv_bytes_per_token=2 * values,
        chat_template=template_source(checkpoint) is not None,
        sampling={n: getattr(defaults, n) for n in recommended},
        images=opened.vision is not None,
        mmproj=None if checkpoint.mmproj is None else str(checkpoint.mmproj.path),
    )


def _rows(r: _Record) -> list[tuple[str, object]]:
    from octavo.engine.plan import size

    rows: list[tuple[str, object]] = [
        ("path", r.path),
        ("architecture", r.architecture),
        ("parameters", f"{r.parameters / 1e6:,.1f} M"),
        ("size", size(r.bytes)),
        ("tensors", ", ".join(f"{n} {t}" for t, n in r.tensors.items())),
        ("layers", r.layers),
        ("vocabulary", f"{r.vocabulary:,}"),
        ("context", f"{r.context:,}"),
        (
            "KV cache",
            f"{r.kv_heads} heads of {r.head_dim}, "
            f"{r.kv_bytes_per_token / 1024:.1f} KiB a token in bf16",
        ),
    ]
    if r.images:
        rows.append(("images", "yes" if r.mmproj is None else f"yes, with {Path(r.mmproj).name}"))
    if q := r.quality:
        increase = q.perplexity.a / q.perplexity.b - 1
        lost = f"perplexity {increase:+.2%}, KL {q.kl_mean:.4g}, same top-1 {q.top1:.2%}"
        rows.append(("quality", f"{lost} against {q.against} ({q.tokens:,} tokens of {q.data})"))
    if r.task == "generate":
        chats = "yes" if r.chat_template else "no: a base model, use /v1/completions"
        given = ", ".join(f"{n} {value:g}" for n, value in r.sampling.items())
        sampling = given or "the model's files recommend nothing"
        return [*rows, ("sampling", sampling), ("chat template", chats)]
    return [*rows, ("task", TASKS[r.task])]
