"""octavo metrics."""

from __future__ import annotations

import click

from octavo.cli.screen import say


@click.command()
@click.argument("document", type=click.Choice(["markdown", "prometheus", "grafana"]))
def metrics(document: str) -> None:
    """Print what the metrics of a server mean: a page, rules for Prometheus, or a dashboard.

    octavo metrics prometheus > alerts.yaml
    """
    from octavo.server.deploy import DOCUMENTS

    say(DOCUMENTS[document][1](), end="")
