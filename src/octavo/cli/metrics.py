"""octavo metrics."""

from __future__ import annotations

import click

from octavo.cli.numbers import count
from octavo.cli.screen import say
from octavo.errors import UsageError


@click.command()
@click.argument("document", type=click.Choice(["markdown", "prometheus", "grafana"]))
@click.option(
    "--faster",
    type=count(1, 60),
    default=1,
    help="Divide all times of the rules, to try them: 60, the most, makes seconds of minutes. [1]",
)
def metrics(document: str, faster: int) -> None:
    """Print what the metrics of a server mean: a page, rules for Prometheus, or a dashboard.

    octavo metrics prometheus > alerts.yaml
    """
    from octavo.server.deploy import DOCUMENTS, rules

    if faster > 1 and document != "prometheus":
        raise UsageError(f"--faster {faster} is for rules", "octavo metrics prometheus")
    say(rules(faster) if faster > 1 else DOCUMENTS[document][1](), end="")
