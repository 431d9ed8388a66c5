"""octavo plan."""

from __future__ import annotations

import click

from octavo.cli.options import sizing


@click.command()
@click.argument("model")
@sizing
def plan(
    model: str,
    memory: str | None,
    context: int | None,
    threads: int | None,
    kv_dtype: str,
    offline: bool,
) -> None:
    """Print the memory MODEL would take, without loading it."""
    from octavo.backends.cpu.footprint import kept
    from octavo.checkpoint.base import GROUPED
    from octavo.checkpoint.hub import locate
    from octavo.engine.loader import open_model
    from octavo.engine.plan import make_plan, size

    located = locate(model, offline=offline)
    opened = open_model(located.path)
    p = make_plan(
        opened.lowered, name=located.name, memory=memory, context=context, threads=threads,
        kv_dtype=kv_dtype,
    )  # fmt: skip
    for k in kept(opened.lowered):
        wider = f", {k.bits} bits a code in the file" if k.type in GROUPED else ""
        click.echo(
            f"  {k.count} matrices as {k.type.name}{wider}: {size(k.stored)} -> {size(k.packed)}"
        )
    for name, value in (
        ("weights", p.weights),
        ("buffers", p.buffers),
        ("KV cache", p.cache),
        ("process", p.process),
    ):
        click.echo(f"{name:<10} {size(value):>10}")
    click.echo(f"{'total':<10} {size(p.total):>10}   of {size(p.available)} available")
    click.echo(
        f"{'context':<10} {p.context:>10,}   tokens (the model's own is {p.model_context:,})"
    )
    times = p.tokens / p.context
    click.echo(
        f"{'capacity':<10} {p.tokens:>10,}   tokens = {times:.1f} requests at the full context"
    )
