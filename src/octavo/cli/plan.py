"""octavo plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from octavo.cli.options import draft_option, json_flag, model_argument, sizing
from octavo.cli.screen import say, say_json, table

if TYPE_CHECKING:
    from octavo.backends.base import PackedMatrices
    from octavo.engine.draft_plan import DraftPlan
    from octavo.engine.plan import Plan


@click.command()
@model_argument()
@json_flag
@draft_option
@sizing
def plan(
    model: str,
    as_json: bool,
    draft: str | None,
    memory: str | None,
    context: int | None,
    threads: int | None,
    kv_dtype: str,
    activations: str,
    mmproj: str,
    vision_dtype: str,
    device: str,
    offline: bool,
) -> None:
    """Print the memory MODEL would take, without loading it.

    --memory may be more than this machine has, to plan for another.
    """
    from octavo.backends import resolve_device
    from octavo.checkpoint.hub import locate
    from octavo.engine.open import open_draft, open_model
    from octavo.engine.plan import make_plan

    located = locate(model, offline=offline)
    device = resolve_device(device, what_if=True)
    opened = open_model(located.path, mmproj=mmproj, vision_dtype=vision_dtype, device=device)
    p = make_plan(
        opened.compiled, name=located.name, memory=memory, context=context, threads=threads,
        kv_dtype=kv_dtype, activations=activations, what_if=True, encoder=opened.encoder,
        draft=open_draft(locate(draft, offline=offline).path, device) if draft else None,
    )  # fmt: skip
    matrices = opened.compiled.matrices
    if as_json:
        say_json(_record(located.name, p, matrices))
    else:
        _print(p, matrices)


def _record(name: str, p: Plan, matrices: list[PackedMatrices]) -> dict[str, object]:
    """The plan as JSON. The names are stable."""
    return {
        "model": name,
        "device": p.device,
        "weights": p.weights,
        "buffers": p.buffers,
        "kv_cache": p.cache,
        "encoder": p.encoder,
        "image_cache": p.image_cache,
        "draft": p.draft.total if p.draft else 0,
        "vision_dtype": p.vision_dtype,
        "process": p.process,
        "total": p.total,
        "available": p.available,
        "context": p.context,
        "model_context": p.model_context,
        "capacity": p.tokens,
        "threads": p.threads,
        "kv_dtype": p.kv_dtype,
        "activations": p.activations,
        "matrices": [
            {
                "count": k.count, "type": k.type.name, "bits": k.bits, "stored": k.stored,
                "packed": k.packed,
            }
            for k in matrices
        ],
    }  # fmt: skip


def _parts(draft: DraftPlan) -> str:
    from octavo.engine.plan import size

    return f"weights {size(draft.weights)}, KV cache {size(draft.cache)}"


def _stored_as(p: Plan) -> str:
    return "" if p.vision_dtype == "auto" else f", as {p.vision_dtype}"


def _print(p: Plan, matrices: list[PackedMatrices]) -> None:
    from octavo.checkpoint.base import GROUPED
    from octavo.engine.plan import size

    for k in matrices:
        wider = f", {k.bits} bits a code in the file" if k.type in GROUPED else ""
        say(f"  {k.count} matrices as {k.type.name}{wider}: {size(k.stored)} -> {size(k.packed)}")
    over = " (more than there is)" if p.total > p.available else ""
    table(
        [
            ("device", p.device, ""),
            ("weights", size(p.weights), ""),
            ("buffers", size(p.buffers), ""),
            ("KV cache", size(p.cache), ""),
            *(
                [
                    ("encoder", size(p.encoder), f"of images{_stored_as(p)}"),
                    ("image cache", size(p.image_cache), "embeddings of images seen before"),
                ]
                if p.encoder
                else []
            ),
            *([("draft model", size(p.draft.total), _parts(p.draft))] if p.draft else []),
            ("process", size(p.process), ""),
            ("total", size(p.total), f"of {size(p.available)} available{over}"),
            ("KV cache type", p.kv_dtype, ""),
            ("activations", p.activations, "inputs of quantized layers"),
            ("context", f"{p.context:,}", f"tokens (the model's own is {p.model_context:,})"),
            (
                "capacity",
                f"{p.tokens:,}",
                f"tokens = {p.tokens / p.context:.1f} requests at the full context",
            ),
        ],
        right=(1,),
    )
