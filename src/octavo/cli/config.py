"""octavo config."""

from __future__ import annotations

import click

from octavo.cli.numbers import count
from octavo.cli.options import json_flag
from octavo.cli.remote import Remote, gateway_options
from octavo.cli.screen import say, say_json, table, utc


@click.group()
def config() -> None:
    """Show the configurations that a gateway has had, and go back to one."""


@config.command("list")
@gateway_options
@json_flag
def list_(server: str, admin_key: str | None, as_json: bool) -> None:
    """List the configurations that are kept, the latest first; * is in force."""
    gateway = Remote(server, admin_key)
    found = gateway.object("/v1/gateway/config/history")
    if as_json:
        return say_json(found)
    now = gateway.object("/v1/gateway/config")["version"]
    rows = [
        ("*" if c["version"] == now else "", c["version"], utc(c["at"]), c["who"], c["hash"])
        for c in found["configs"]
    ]
    table(rows, ("", "version", "since", "by", "hash"), right=(1,))


@config.command()
@click.argument("version", type=count(1), required=False)
@gateway_options
def show(version: int | None, server: str, admin_key: str | None) -> None:
    """Show configuration VERSION, or that which is in force, as JSON, which --config takes."""
    path = "/v1/gateway/config" + (f"?version={version}" if version is not None else "")
    say_json(Remote(server, admin_key).object(path)["config"])


@config.command()
@click.argument("version", type=count(1))
@gateway_options
def rollback(version: int, server: str, admin_key: str | None) -> None:
    """Put configuration VERSION in force again, as a new one."""
    body = {"version": version}
    done = Remote(server, admin_key).object("/v1/gateway/config/rollback", body)
    say("\n".join(done["changes"]) or "the gateway has this configuration")
    say(f"configuration {done['version']} is in force")
