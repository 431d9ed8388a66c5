"""octavo tune."""

from __future__ import annotations

import click

from octavo.cli.options import model_argument, offline_option, threads_option
from octavo.cli.screen import say, step_bar


@click.command()
@model_argument()
@threads_option
@offline_option
def tune(model: str, threads: int | None, offline: bool) -> None:
    """Find the layers of MODEL that drafts can do without, for serve --speculation self.

    What is found is kept in the cache folder, for this model as it is.
    """
    from octavo.bench.tune import tune as find
    from octavo.checkpoint.hub import locate

    located = locate(model, offline=offline)
    tuned, path = find(located.path, located.name, threads, step_bar)
    say(
        f"{len(tuned.skip)} of {tuned.parts} parts of layers left out: drafts have "
        f"{100 * tuned.agreement:.0f} % of the tokens right, and take {100 * tuned.cost:.0f} % of "
        "a step for each"
    )
    say(f"expected: {tuned.gain:.2f} times as many tokens a second; kept in {path}")
    if tuned.gain > 1.05:
        say(f"try: octavo serve {model} --speculation self")
    else:
        say("self-speculation does not pay for this model: it would stay off by itself")
