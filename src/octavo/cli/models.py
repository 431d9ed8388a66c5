"""octavo models."""

from __future__ import annotations

import click


@click.command()
@click.option("--architectures", is_flag=True, help="List the supported architectures instead.")
def models(architectures: bool) -> None:
    """List the models on this machine."""
    from octavo.checkpoint.hub import DEMOS, installed

    if architectures:
        from octavo.models import ARCHITECTURES

        click.echo("\n".join(sorted(ARCHITECTURES)))
        return
    found = installed()
    for name, size, path in found:
        click.echo(f"{name:<40} {size / 1e6:>10.1f} MB   {path}")
    for name in sorted(DEMOS.keys() - {name for name, _, _ in found}):
        click.echo(f"{name:<40} {'not fetched':>13}   octavo pull {name}")
