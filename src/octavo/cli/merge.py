"""octavo merge."""

from __future__ import annotations

from pathlib import Path

import click

from octavo.cli.next_step import say_next
from octavo.cli.options import json_flag, model_argument, offline_option
from octavo.cli.screen import progress_bar, say, say_json


@click.command()
@model_argument()
@click.option(
    "--lora", "adapters", required=True, multiple=True, metavar="FOLDER",
    type=click.Path(path_type=Path), help="A PEFT adapter; more of them are added up.",
)  # fmt: skip
@click.option(
    "--output", required=True, type=click.Path(path_type=Path), metavar="FOLDER",
    help="A new folder.",
)  # fmt: skip
@offline_option
@json_flag
def merge(
    model: str, adapters: tuple[Path, ...], output: Path, offline: bool, as_json: bool
) -> None:
    """Write MODEL with LoRA adapters merged into its weights, as a folder of safetensors.

    Sums are made in fp32 and stored in the model's 16 bits; quantized models become 16 bits.
    """
    from octavo.checkpoint import open_checkpoint
    from octavo.checkpoint.hub import locate
    from octavo.compress.merge import Merge

    checkpoint = open_checkpoint(locate(model, offline=offline).path)
    job = Merge(checkpoint, adapters, output)
    with progress_bar("Merging", checkpoint.nbytes) as advance:
        result = job.run(advance)
    if as_json:
        found = {"output": str(result.output), "adapters": [str(a) for a in result.adapters]}
        return say_json({**found, "layers": result.layers, "bytes": result.nbytes})
    say(f"{result.layers} layers have changed; {output} takes {result.nbytes / 1e6:,.1f} MB")
    say_next(output)
