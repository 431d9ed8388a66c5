"""octavo models."""

from __future__ import annotations

import click

from octavo.cli.options import json_flag
from octavo.cli.screen import say, say_json, table


@click.command()
@click.option("--architectures", is_flag=True, help="List the supported architectures instead.")
@json_flag
def models(architectures: bool, as_json: bool) -> None:
    """List the models on this machine."""
    from octavo.checkpoint.hub import DEMOS, installed

    if architectures:
        from octavo.models import ARCHITECTURES

        if as_json:
            say_json(sorted(ARCHITECTURES))
        else:
            say("\n".join(sorted(ARCHITECTURES)))
        return
    found = installed()
    if as_json:
        say_json([{"name": m.name, "bytes": m.bytes, "path": str(m.path)} for m in found])
        return
    rows = [(m.name, f"{m.bytes / 1e6:,.1f} MB", m.path) for m in found]
    missing = sorted(DEMOS.keys() - {m.name for m in found})
    table(rows + [(name, "not fetched", f"octavo pull {name}") for name in missing], right=(1,))
