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
    from octavo.backends import get_backend
    from octavo.checkpoint.removal import find_removal

    removal = find_removal(model)
    backend = get_backend()
    packed = [file for folder in removal.folders for file in backend.packed_files(folder)]
    size = f"{(removal.bytes + sum(f.stat().st_size for f in packed)) / 1e6:,.1f} MB"
    for path in (*removal.folders, *packed):
        say(path)
    if not yes:
        click.confirm(f"Delete this and free {size}?", abort=True)
    removal.run()
    for file in packed:
        file.unlink(missing_ok=True)
    say(f"deleted {removal.name}, {size} freed")
