"""octavo quantize."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.budget import budget_options, search_mix
from octavo.cli.next_step import say_next
from octavo.cli.options import json_flag, model_argument, offline_option
from octavo.cli.screen import progress_bar, say, say_json, size, table
from octavo.process import unmap_freed_blocks

if TYPE_CHECKING:
    from octavo.compress.jobs import Rounded
    from octavo.compress.recipes import Recipe


MOST_KEPT = 12  # layers that are named
MATRIX = 4 << 20  # bytes: what is smaller is allocated too often to be worth it


def _list(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    from octavo.compress.recipe_file import builtin
    from octavo.compress.recipes import GgufRecipe

    if wanted:
        rows = []
        for r in builtin().values():
            makes = "GGUF" if isinstance(r, GgufRecipe) else ", ".join(r.layouts)
            rows.append((r.name, makes, r.summary))
        table(rows, ("recipe", "makes", ""))
        ctx.exit()


@click.command()
@model_argument()
@click.option(
    "--recipe", metavar="NAME|FILE",
    help="How to make it small: one of --list, or a .yaml file.",
)  # fmt: skip
@click.option(
    "--output", required=True, type=click.Path(path_type=Path), metavar="PATH",
    help="A new .gguf file, or a folder.",
)  # fmt: skip
@click.option(
    "--format",
    type=click.Choice(["gguf", "gptq", "awq", "compressed-tensors", "mlx", "safetensors"]),
    help="How the weights are stored. [the first that --list names]",
)  # fmt: skip
@click.option(
    "--data", type=click.Path(path_type=Path), metavar="FILE",
    help="Text that methods see layers' inputs with: .txt, .jsonl, a folder of them, or self: what "
    "MODEL writes. [Python's manual]",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only say how large it would be.")
@click.option("--force", is_flag=True, help="Replace the files that --output names.")
@offline_option
@click.option(
    "--list", is_flag=True, is_eager=True, expose_value=False, callback=_list,
    help="List the recipes.",
)  # fmt: skip
@budget_options
@json_flag
def quantize(
    model: str, recipe: str | None, output: Path, format: str | None, data: Path | None,
    dry_run: bool, force: bool, offline: bool, as_json: bool, **limits: Any,
) -> None:  # fmt: skip
    """Make MODEL small: round its weights to fewer bits and write it as a new model.

    A folder, or a GGUF file, becomes a folder; a GGUF file by a GGUF recipe a GGUF file. Start from
    a model in 16 bits: what is lost already does not come back. Run it again to go on where it was
    cut off.
    """
    from octavo.checkpoint import open_checkpoint
    from octavo.checkpoint.hub import locate
    from octavo.compress.jobs import check_replaced
    from octavo.compress.quantize import job_of, suggestion
    from octavo.compress.recipe_file import find_recipe
    from octavo.errors import UsageError

    found = find_recipe(recipe) if recipe is not None else None
    if output.is_file() and not (force or dry_run):
        raise UsageError(f"{output} is there already", "--force")
    if recipe is not None and limits["budget"] is not None:
        raise UsageError("either --recipe or --budget says how small, not both")
    checkpoint = open_checkpoint(locate(model, offline=offline).path)
    if found is None and limits["budget"] is None:
        hint = suggestion(checkpoint, output, format)
        raise UsageError("either --recipe or --budget says how small", hint)
    if found is None:
        if format not in (None, "gguf") or dry_run:
            raise UsageError(
                "--budget makes a GGUF file, and measures; it takes no --format or --dry-run"
            )
        return search_mix(checkpoint, output, data, as_json, typed=model, **limits)
    if any(v is not None for v in limits.values()):
        raise UsageError("--context, --concurrency, --max-kl and --chart go with --budget")
    job = job_of(checkpoint, found, output, format, data)
    if dry_run:
        return _show(job.forecast(), found, as_json, "would take")
    if not force:
        check_replaced(job)
    unmap_freed_blocks(MATRIX)
    with progress_bar(f"Rounding to {found.name}", job.work) as advance:
        result = job.run(advance, lambda text: say(text, err=True))
    _show(result, found, as_json, "takes")
    if not as_json:
        say_next(output)


def _instead(recipe: Recipe, group: int) -> str:
    """What a recipe wanted, where no layers have such groups."""
    from octavo.compress.grids import Grid

    schemes = [getattr(recipe, "weights", None), *(rule.becomes for rule in recipe.rules)]
    wanted = [s.group for s in schemes if isinstance(s, Grid) and s.group]
    return f" instead of {wanted[0]}" if wanted and group not in wanted else ""


def _show(r: Rounded, recipe: Recipe, as_json: bool, takes: str) -> None:
    if as_json:
        return say_json(
            {
                "output": str(r.output), "bytes_before": r.bytes_before,
                "bytes_after": r.bytes_after, "bits_per_weight": round(r.bits, 3),
                "tensors": dict(r.kinds), "group": r.group, "kept": list(r.kept),
                "dynamic": list(r.dynamic),
                "losses": [asdict(loss) for loss in r.losses], "resumed": r.resumed,
                "learned": r.learned, "reads": list(r.reads),
            }
        )  # fmt: skip
    for kind, count in sorted(r.kinds.items(), key=lambda item: -item[1]):
        say(f"  {count} {'tensor' if count == 1 else 'tensors'} as {kind}")
    for name in r.kept[:MOST_KEPT]:
        say(f"  {name} stays as it is")
    if len(r.kept) > MOST_KEPT:
        say(f"  so do {len(r.kept) - MOST_KEPT} more; --json has them all")
    if r.dynamic:
        layers = "layer takes" if len(r.dynamic) == 1 else "layers take"
        say(f"  {len(r.dynamic)} {layers} a scale a token: one for all tokens lost more")
    if r.group:
        say(f"  {r.group} columns share a scale{_instead(recipe, r.group)}")
    if all(r.reads):
        whole, read = r.reads
        say(
            f"  a token reads {size(read)} of weights instead of {size(whole)}: "
            f"{whole / read:.1f} times as fast, where memory is what it waits for"
        )
    if r.losses:
        error, plain = (sum(getattr(x, n) for x in r.losses) for n in ("error", "plain"))
        share = error / plain if plain else 1
        say(f"  outputs lose {share:.0%} of what they do by rounding to the nearest")
        for loss in r.losses:
            if loss.method == "rtn":
                say(f"  {loss.name} is rounded to the nearest: nothing else lost less")
    if r.learned is not None:
        before, after = r.learned
        say(f"  learned: a KL of {after:.4g} nats a token, {before:.4g} before, on text held back")
    say(
        f"{r.output} {takes} {size(r.bytes_after)}, {r.bits:.2f} bits a weight "
        f"({size(r.bytes_before)} before)"
    )
