"""octavo experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from octavo.cli.numbers import Number
from octavo.cli.options import json_flag
from octavo.cli.remote import Remote, gateway_options
from octavo.cli.screen import say, say_json, table
from octavo.errors import UsageError
from octavo.yaml_file import read_yaml


@click.group()
def experiment() -> None:
    """Compare variants of a model, its parameters or its prompt on real requests."""


@experiment.command()
@click.option("--rate", type=Number(0, 1),
              help="A rate as it is now (0 to 1), like that of thumbs up.")  # fmt: skip
@click.option("--mean", type=Number(), help="Or the mean of another metric, with --deviation.")
@click.option("--deviation", type=Number(0), help="Its standard deviation between units.")
@click.option("--effect", type=Number(), required=True, help="Change to find: 0.05 is 5 %.")
@click.option("--alpha", type=Number(0, 1), default=0.05, show_default=True,
              help="How likely a difference may be found that there is not.")  # fmt: skip
@click.option("--power", type=Number(0, 1), default=0.8, show_default=True,
              help="How likely one shall be found that there is.")  # fmt: skip
@click.option("--share", type=Number(0, 1), default=0.5, show_default=True,
              help="Of the smaller of two variants.")  # fmt: skip
@click.option("--explained", type=Number(0, 1), default=0.0, show_default=True,
              help="Part of the variance that covariates take away (CUPED).")  # fmt: skip
@click.option("--per-day", type=Number(0), help="Units that come a day.")
@json_flag
def plan(
    rate: float | None, mean: float | None, deviation: float | None, as_json: bool, **more: Any
) -> None:
    """Say how many units (users, sessions) an experiment needs."""
    from dataclasses import asdict

    from octavo.experiments import plan as planning

    if rate is not None and mean is None and deviation is None:
        found = planning.rate_plan(rate, **more)
    elif rate is None and mean is not None and deviation is not None:
        found = planning.plan(mean, deviation, **more)
    else:
        raise UsageError("a plan needs --rate, or --mean and --deviation", "--rate 0.1")
    if as_json:
        return say_json(asdict(found))
    days = "" if found.days is None else f", {found.days:.1f} days"
    say(f"{found.units:,} units of both variants together{days}, looked at as often as one likes")
    say(f"({found.fixed:,} with one look at the end; a large effect is found earlier)")
    say(f"in its file: horizon: {found.units}")


@experiment.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@gateway_options
def start(file: Path, server: str, admin_key: str | None) -> None:
    """Begin the experiment that FILE describes, in YAML; see docs/releases.md."""
    import msgspec

    from octavo.experiments.spec import convert

    spec = convert(read_yaml(file))
    Remote(server, admin_key).ask("/v1/experiments", msgspec.to_builtins(spec))
    say(
        f"{spec.id} has begun: {', '.join(f'{n} {v.weight:g} %' for n, v in spec.variants.items())}"
    )


@experiment.command("list")
@gateway_options
@json_flag
def list_(server: str, admin_key: str | None, as_json: bool) -> None:
    """Show all experiments and the weights of their variants."""
    found = Remote(server, admin_key).object("/v1/experiments")
    if as_json:
        return say_json(found)
    rows = [
        (one["id"], one["spec"]["model"], "ended" if one["ended"] else "runs",
         ", ".join(f"{n} {v['weight']:g} %" for n, v in one["spec"]["variants"].items()))
        for one in found["experiments"]
    ]  # fmt: skip
    table(rows, ("id", "model", "state", "variants")) if rows else say("no experiment yet")


@experiment.command()
@click.argument("id")
@click.argument("weights", nargs=-1, required=True, metavar="VARIANT=WEIGHT…")
@gateway_options
def shares(id: str, weights: tuple[str, ...], server: str, admin_key: str | None) -> None:
    """Give variants of the experiment ID these percentages of the units: VARIANT=WEIGHT…."""
    pairs = [one.rpartition("=") for one in weights]
    try:
        wanted = {name: float(weight) for name, _, weight in pairs}
    except ValueError:
        raise UsageError(f"{' '.join(weights)!r} are no weights", f"{id} a=80 b=20") from None
    Remote(server, admin_key).ask(
        f"/v1/experiments/{quote(id, safe='')}/shares", {"weights": wanted}
    )
    say(f"{id} from now on: {', '.join(f'{n} {w:g} %' for n, w in wanted.items())}")


@experiment.command()
@click.argument("id")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path),
              help="Write a page with plots to this file.")  # fmt: skip
@gateway_options
@json_flag
def report(id: str, html: Path | None, server: str, admin_key: str | None, as_json: bool) -> None:
    """Show what the experiment ID says so far."""
    gateway, path = Remote(server, admin_key), f"/v1/experiments/{quote(id, safe='')}/report"
    if html is not None:
        html.write_bytes(gateway.ask(path + "?format=html"))
        return say(f"wrote {html}")
    found = gateway.object(path)
    if as_json:
        return say_json(found)
    counts = ", ".join(f"{name} {n:,}" for name, n in found["mismatch"]["counts"].items())
    moved = found["moved"]
    say(f"units: {counts}" + (f"; {moved:,} that changed their variant left out" if moved else ""))
    if found["mismatch"]["found"]:
        return say("the variants do not have their shares of the units: nothing can be said")
    rows = [
        (c["metric"], c["variant"], f"{c['value']:.4g}", f"{c['control']:.4g}",
         f"{c['difference']:+.3g}", f"{c['low']:+.3g} to {c['high']:+.3g}",
         f"{c['explained']:.0%}", "yes" if c["decided"] else "no")
        for c in found["comparisons"]
    ]  # fmt: skip
    columns = ("metric", "variant", "mean", "control", "difference", "interval", "explained")
    if rows:
        table(rows, (*columns, "decided"), right=(2, 3, 4, 5, 6))
    if found["waiting"]:
        say(f"too few units yet, or none that differ: {', '.join(found['waiting'])}")


@experiment.command()
@click.argument("id")
@gateway_options
def stop(id: str, server: str, admin_key: str | None) -> None:
    """End the experiment ID: everybody gets what they asked for again."""
    Remote(server, admin_key).ask(f"/v1/experiments/{quote(id, safe='')}/stop", {})
    say(f"{id} has ended")
