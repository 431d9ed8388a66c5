"""octavo pull."""

from __future__ import annotations

import click

from octavo.cli.options import model_argument, offline_option
from octavo.cli.screen import progress_bar, say


@click.command()
@model_argument()
@offline_option
def pull(model: str, offline: bool) -> None:
    """Fetch MODEL and print where it lies."""
    from octavo.checkpoint.hub import locate
    from octavo.checkpoint.open import open_checkpoint

    located = locate(model, offline=offline, progress=progress_bar)
    open_checkpoint(located.path)  # a damaged file is better noticed now
    say(located.path)
