"""octavo pull."""

from __future__ import annotations

import click

from octavo.cli.options import progress_bar


@click.command()
@click.argument("model")
@click.option("--offline", is_flag=True, help="Only say where it is.")
def pull(model: str, offline: bool) -> None:
    """Fetch MODEL and print where it lies."""
    from octavo.checkpoint.hub import locate
    from octavo.checkpoint.open import open_checkpoint

    located = locate(model, offline=offline, progress=progress_bar)
    open_checkpoint(located.path)  # a damaged file is better noticed now
    click.echo(located.path)
