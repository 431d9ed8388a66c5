"""octavo metrics."""

from __future__ import annotations

import click


@click.command()
@click.argument("document", type=click.Choice(["markdown", "prometheus", "grafana"]))
def metrics(document: str) -> None:
    """Print what the metrics of a server mean: a page, rules for Prometheus, or a dashboard.

    octavo metrics prometheus > alerts.yaml
    """
    from octavo.server.deploy import DOCUMENTS

    click.echo(DOCUMENTS[document][1](), nl=False)
