"""octavo release."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from octavo.cli.numbers import count
from octavo.cli.options import json_flag, together
from octavo.cli.remote import Remote, ServerRefused, gateway_options
from octavo.cli.screen import say, say_json, table, utc
from octavo.errors import UsageError
from octavo.yaml_file import read_yaml

UPDATE = 3600.0  # seconds for the new version to be loaded
spec_options = together(
    click.option("--steps", metavar="PERCENTS",
                 help="Its shares, one after another. [5,10,25,50,100]"),
    click.option("--hold", metavar="TIME", help="How long a step lasts at least. [5m]"),
    click.option("--min-events", type=count(0),
                  help="Requests of the canary that a step needs. [100]"),
    click.option("--file", "file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
                  help="All of that, and guards, in YAML; see docs/releases.md."),
)  # fmt: skip


@click.group()
def release() -> None:
    """Give a new version of a model more and more requests, while tests watch every one."""


@release.command()
@click.argument("model", required=False)
@click.option("--canary", metavar="POOL", help="Pool of upstreams with the new version.")
@click.option("--stable", metavar="POOL", help="Pool with the old version. [what serves MODEL]")
@click.option("--baseline", metavar="POOL", help="Pool of the old version to compare with.")
@spec_options
@gateway_options
def start(
    model: str | None, steps: str | None, file: Path | None, server: str, admin_key: str | None,
    **options: Any,
) -> None:  # fmt: skip
    """Begin a release of MODEL."""
    import msgspec

    from octavo.release.spec import convert

    given = _given(file, steps, options)
    if model is not None:
        given["model"] = model
    for name in ("model", "canary"):
        if name not in given:
            raise UsageError(
                f"a release needs a {name}", "octavo release start MODEL --canary POOL"
            )
    spec = convert(given)
    done = Remote(server, admin_key).object("/v1/releases", msgspec.to_builtins(spec))
    say(
        f"{done['id']}: {spec.canary} gets {spec.plan[0][0]:.3g} of the requests for {spec.model}, "
        f"{done['spec']['stable']} the others"
    )


def _given(file: Path | None, steps: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """What options say of a release, beside what a file does. Raises UsageError."""
    given = {} if file is None else read_yaml(file)
    if not isinstance(given, dict):
        raise UsageError(f"{file} is no mapping", "octavo release start MODEL --canary POOL")
    given |= {name: value for name, value in options.items() if value is not None}
    if steps is not None:
        given["steps"] = [step.strip() for step in steps.split(",")]
    return given


@release.command()
@click.argument("model")
@click.option("--to", required=True, metavar="MODEL", help="The new version.")
@click.option("--memory", metavar="SIZE",
              help="Most memory of each of its servers. [that of the old version's]")  # fmt: skip
@spec_options
@gateway_options
def update(
    model: str, to: str, memory: str | None, steps: str | None, file: Path | None, server: str,
    admin_key: str | None, **options: Any,
) -> None:  # fmt: skip
    """Replace MODEL, which a local pool of the gateway serves, by another one, in a release."""
    to = str(Path(to).resolve()) if Path(to).exists() else to  # the gateway's folder is another
    body = {"model": model, "to": to, "memory": memory, "release": _given(file, steps, options)}
    try:
        done = Remote(server, admin_key).object("/v1/releases/update", body, UPDATE)
    except KeyboardInterrupt:
        say(f"the gateway goes on; octavo release status {model}", err=True)
        raise click.exceptions.Exit(130) from None
    say(f"{done['id']}: pool {done['pool']} serves {to}; octavo release status {model}")


@release.command()
@click.argument("model", required=False)
@gateway_options
@json_flag
def status(model: str | None, server: str, admin_key: str | None, as_json: bool) -> None:
    """Show the release of MODEL and what its guards have seen, or all releases."""
    gateway = Remote(server, admin_key)
    path = "/v1/releases" + (f"?model={quote(model, safe='')}" if model else "")
    found = gateway.object(path)
    if as_json:
        say_json(found)
    elif model is not None:
        _show(found)
    elif not found["releases"]:
        say("there was no release")
    else:
        rows = [(r["model"], r["phase"], r["step"] + 1, r["reason"]) for r in found["releases"]]
        table(rows, ("model", "state", "step", "why"), right=(2,))


def _show(found: dict[str, Any]) -> None:
    shares = ", ".join(f"{arm} {share:.4g}" for arm, share in found["shares"].items())
    say(f"{found['model']}: {found['phase']}, step {found['step'] + 1}: {shares}")
    say(f"{found['reason']}\n")
    rows = []
    for g in found["guards"]:
        progress = max(0.0, g["evidence"]) / g["needed"]
        state = "fired" if g["fired"] else "watched" if g["watched"] else "well"
        rows.append(
            (g["guard"], _number(g["value"]), _number(g["other"]), g["count"],
             f"{math.exp(min(g['evidence'], 99)):.3g} of {math.exp(g['needed']):.0f}",
             f"{min(1, progress):.0%}", state)
        )  # fmt: skip
    columns = ("guard", "canary", "baseline", "requests", "evidence", "", "state")
    table(rows, columns, right=(1, 2, 3, 4, 5))
    say()
    for r in found["audit"]:
        detail = "" if r["what"] == "start" else r["detail"]
        say(f"{utc(r['at'])}  {r['who']}: {r['what']}  {detail}".rstrip())


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _act(model: str, action: str, server: str, admin_key: str | None) -> None:
    done = Remote(server, admin_key).object(f"/v1/releases/{action}", {"model": model})
    say(f"{done['model']}: {done['phase']}, step {done['step'] + 1}")


@release.command()
@click.argument("model")
@click.option("--full", is_flag=True, help="All requests now, and for good.")
@gateway_options
def promote(model: str, full: bool, server: str, admin_key: str | None) -> None:
    """Take MODEL's release to its next step now, also from a pause."""
    _act(model, "finish" if full else "promote", server, admin_key)


@release.command()
@click.argument("model")
@gateway_options
def pause(model: str, server: str, admin_key: str | None) -> None:
    """Keep MODEL's release at its present step; guards go on."""
    _act(model, "pause", server, admin_key)


@release.command()
@click.argument("model")
@gateway_options
def resume(model: str, server: str, admin_key: str | None) -> None:
    """Go on with MODEL's release after a pause: the step begins anew."""
    _act(model, "resume", server, admin_key)


@release.command()
@click.argument("model")
@gateway_options
def rollback(model: str, server: str, admin_key: str | None) -> None:
    """Give all requests for MODEL to the old version at once."""
    try:
        _act(model, "rollback", server, admin_key)
    except ServerRefused as e:
        raise ServerRefused(str(e), *_way_back(Remote(server, admin_key), model)) from None


def _way_back(gateway: Remote, model: str) -> tuple[str, ...]:
    """What leads back to the old version of a model, if its release was promoted."""
    found = gateway.object(f"/v1/releases?model={quote(model, safe='')}")
    if found["phase"] != "promoted":
        return ()
    old, pools = found["spec"]["stable"], gateway.object("/v1/upstreams")["upstreams"]
    if any(upstream["pool"] == old for upstream in pools):
        return (f"octavo release start {model} --canary {old} --steps 100",)
    return (f"octavo release update {model} --to OLD_VERSION",)
