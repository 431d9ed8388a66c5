"""octavo key, octavo usage."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.numbers import count
from octavo.cli.options import json_flag
from octavo.cli.screen import say, say_json, table

if TYPE_CHECKING:
    from octavo.server.keys import Key

keys_option = click.option(
    "--keys", metavar="FILE|URL", required=True, envvar="OCTAVO_KEYS",
    help="SQLite file or postgresql:// database with the keys, which octavo serve --keys reads.",
)  # fmt: skip


@click.group()
def key() -> None:
    """Create, list and revoke API keys. Servers notice within a second."""


@key.command()
@click.argument("name")
@keys_option
@click.option("--role", type=click.Choice(["user", "admin"]), default="user", show_default=True,
              help="What the key may do; an admin may change the server.")  # fmt: skip
@click.option("--requests-per-minute", type=count(), help="Requests in a minute. [no limit]")
@click.option("--tokens-per-minute", type=count(), help="Tokens in a minute. [no limit]")
@click.option("--tokens-per-day", type=count(), help="Tokens in a day. [no limit]")
@click.option("--concurrent", type=count(), help="Requests at a time. [no limit]")
@click.option(
    "--model", "models", multiple=True, metavar="MODEL",
    help="The only model that the key may use (repeatable). [all]",
)  # fmt: skip
def create(name: str, keys: str, role: Any, models: tuple[str, ...], **limits: int | None) -> None:
    """Make a key called NAME and print it: it is shown this once."""
    from octavo.server.keys import Key, KeyLimits, KeyStore

    say(KeyStore(keys).create(Key(name, role, KeyLimits(**limits), models)))


@key.command(name="list")
@keys_option
@json_flag
def list_keys(keys: str, as_json: bool) -> None:
    """List the keys: names, roles and limits."""
    from octavo.server.keys import KeyStore

    found = list(KeyStore(keys).keys().values())
    if as_json:
        say_json([asdict(each) for each in found])
    else:
        table([(k.name, k.role, _limits(k), ", ".join(k.models) or "all") for k in found],
              ("name", "role", "limits", "models"))  # fmt: skip


def _limits(key: Key) -> str:
    given = ((name, value) for name, value in asdict(key.limits).items() if value is not None)
    return ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in given) or "none"


@key.command()
@click.argument("name")
@keys_option
def revoke(name: str, keys: str) -> None:
    """Delete the key called NAME. What it has used stays on record."""
    from octavo.server.keys import KeyStore

    KeyStore(keys).revoke(name)
    say(f"revoked {name}")


@click.command()
@keys_option
@click.option("--days", type=count(1, 3660), default=30, show_default=True,
              help="How many days, with today.")  # fmt: skip
@json_flag
def usage(keys: str, days: int, as_json: bool) -> None:
    """Show what each key has used: requests and tokens a day (UTC) and model."""
    from octavo.server.keys import KeyStore

    found = [asdict(each) for each in KeyStore(keys).usage(days)]
    if as_json:
        return say_json(found)
    columns = ("day", "key", "model", "requests", "prompt", "cached", "completion")
    table([tuple(each[c] for c in columns) for each in found], columns, right=(3, 4, 5, 6))
