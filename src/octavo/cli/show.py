"""octavo show."""

from __future__ import annotations

from collections import Counter

import click


@click.command()
@click.argument("model")
@click.option("--program", is_flag=True, help="List the operations of the forward pass.")
@click.option("--offline", is_flag=True, help="Do not fetch anything.")
def show(model: str, program: bool, offline: bool) -> None:
    """Describe MODEL without loading it."""
    from octavo.checkpoint.hub import locate
    from octavo.checkpoint.sampling import RECOMMENDED
    from octavo.engine.defaults import default_params
    from octavo.engine.loader import open_model
    from octavo.engine.plan import size
    from octavo.engine.request import SamplingParams
    from octavo.program import listing
    from octavo.text.chat import template_source

    located = locate(model, offline=offline)
    opened = open_model(located.path)
    if program:
        click.echo(listing(opened.lowered.program))
        return
    checkpoint, p = opened.checkpoint, opened.lowered.program
    types = Counter(t.type.name for t in checkpoint.tensors.values())
    parameters = sum(_product(t.shape) for t in checkpoint.tensors.values())
    c = p.cache
    each = 4 * c.layers * c.kv_heads * c.head_dim / 1024
    rows = {
        "path": checkpoint.path,
        "architecture": checkpoint.architecture,
        "parameters": f"{parameters / 1e6:,.1f} M",
        "size": size(checkpoint.nbytes),
        "tensors": ", ".join(f"{n} {t}" for t, n in types.most_common()),
        "layers": p.cache.layers,
        "vocabulary": f"{p.vocabulary:,}",
        "context": f"{p.context:,}",
        "KV cache": f"{c.kv_heads} heads of {c.head_dim}, {each:.1f} KiB a token in bf16",
    }
    if p.task == "generate":
        chats = template_source(checkpoint) is not None
        defaults, plain = default_params(checkpoint, located.sampling), SamplingParams()
        names = [n for n in RECOMMENDED if getattr(defaults, n) != getattr(plain, n)]
        given = ", ".join(f"{n} {getattr(defaults, n):g}" for n in names)
        rows["sampling"] = given or "the model's files recommend nothing"
        rows["chat template"] = "yes" if chats else "no: a base model, use /v1/completions"
    else:
        rows["task"] = {"embed": "embeddings (/v1/embeddings)", "rank": "reranking (/v1/rerank)"}[
            p.task
        ]
    for key, value in rows.items():
        click.echo(f"{key:<14} {value}")


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total
