"""octavo rm."""

from __future__ import annotations

import click

from octavo.cli.options import model_argument
from octavo.cli.screen import say


@click.command()
@model_argument()
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def rm(model: str, yes: bool) -> None:
    """Delete MODEL from the cache, after saying what and how much.

    Only the caches of Octavo and of the model hub are touched, never files elsewhere.
    """
    from octavo.checkpoint.removal import find_removal

    removal = find_removal(model)
    size = f"{removal.bytes / 1e6:,.1f} MB"
    for folder in removal.folders:
        say(folder)
    if not yes:
        click.confirm(f"Delete these folders and free {size}?", abort=True)
    removal.run()
    say(f"deleted {removal.name}, {size} freed")
