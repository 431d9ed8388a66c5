"""octavo quantize."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from octavo.cli.options import json_flag, model_argument
from octavo.cli.screen import progress_bar, say, say_json, table

if TYPE_CHECKING:
    from octavo.compress.rounding import Rounded


def _list(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    from octavo.compress.recipes import RECIPES, GgufRecipe

    if wanted:
        rows = []
        for r in RECIPES.values():
            makes = "GGUF" if isinstance(r, GgufRecipe) else ", ".join(r.layouts)
            rows.append((r.name, makes, r.summary))
        table(rows, ("recipe", "makes", ""))
        ctx.exit()


@click.command()
@model_argument()
@click.option("--recipe", required=True, metavar="NAME", help="How to make it small; see --list.")
@click.option(
    "--output", required=True, type=click.Path(path_type=Path), metavar="PATH",
    help="A new .gguf file, or a folder.",
)  # fmt: skip
@click.option(
    "--format", "layout", type=click.Choice(["gptq", "awq", "compressed-tensors", "mlx"]),
    help="How a folder stores its weights. [the first that --list names]",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only say how large it would be.")
@click.option("--force", is_flag=True, help="Replace the file that --output names.")
@click.option("--offline", is_flag=True, envvar="OCTAVO_OFFLINE", help="Use only models here.")
@click.option(
    "--list", is_flag=True, is_eager=True, expose_value=False, callback=_list,
    help="List the recipes.",
)  # fmt: skip
@json_flag
def quantize(
    model: str, recipe: str, output: Path, layout: str | None, dry_run: bool, force: bool,
    offline: bool, as_json: bool,
) -> None:  # fmt: skip
    """Make MODEL small: round its weights to fewer bits and write it as a new model.

    A GGUF model becomes a GGUF file, a folder a folder. Start from a model in 16 bits: what is
    lost already does not come back.
    """
    from octavo.checkpoint import open_checkpoint
    from octavo.checkpoint.hub import locate
    from octavo.compress.recipes import find_recipe
    from octavo.compress.rounding import Job
    from octavo.errors import UsageError

    found = find_recipe(recipe)
    checkpoint = open_checkpoint(locate(model, offline=offline).path)
    job = Job(checkpoint, found, output, layout)  # type: ignore[arg-type]
    if dry_run:
        return _show(job.forecast(), as_json, "would take")
    if output.is_file() and not force:
        raise UsageError(f"{output} is there already", "--force")
    with progress_bar(f"Rounding to {found.name}", checkpoint.nbytes) as advance:
        result = job.run(advance)
    _show(result, as_json, "takes")
    if not as_json:
        say(f"try: octavo chat {output}")


def _show(r: Rounded, as_json: bool, takes: str) -> None:
    if as_json:
        return say_json(
            {
                "output": str(r.output), "bytes_before": r.bytes_before,
                "bytes_after": r.bytes_after, "bits_per_weight": round(r.bits, 3),
                "tensors": dict(r.kinds), "group": r.group, "kept": list(r.kept),
            }
        )  # fmt: skip
    for kind, count in sorted(r.kinds.items(), key=lambda item: -item[1]):
        say(f"  {count} tensors as {kind}")
    for name in r.kept:
        say(f"  {name} stays as it is")
    if r.group:
        say(f"  {r.group} columns share a scale")
    say(
        f"{r.output} {takes} {r.bytes_after / 1e6:,.1f} MB, {r.bits:.2f} bits a weight "
        f"({r.bytes_before / 1e6:,.1f} MB before)"
    )
