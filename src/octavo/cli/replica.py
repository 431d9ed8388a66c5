"""octavo replica, octavo route."""

from __future__ import annotations

from typing import Any

import click

from octavo.cli.options import Number, count, json_flag
from octavo.cli.screen import say_json, table

server_options = [
    click.option(
        "--url", default="http://127.0.0.1:8000", show_default=True, envvar="OCTAVO_URL",
        help="The server.",
    ),
    click.option("--admin-key", envvar="OCTAVO_ADMIN_KEY", help="Its admin key."),
    json_flag,
]  # fmt: skip


def at_server(command: Any) -> Any:
    """The options of a command that asks a server as an admin."""
    for option in reversed(server_options):
        command = option(command)
    return command


def ask(url: str, key: str | None, path: str, body: dict[str, Any] | None = None) -> list[Any]:
    """What a server lists. Raises UsageError with what it says to a refusal."""
    import json

    from octavo.cli.http import HttpRefusal, NoAnswer, send
    from octavo.errors import UsageError

    data = None if body is None else json.dumps(body).encode()
    try:
        found = json.loads(send(url.rstrip("/") + path, key, data, None))["data"]
        assert isinstance(found, list)
        return found
    except HttpRefusal as e:
        hint = ["--admin-key KEY"] if e.status in (401, 403) else []
        raise UsageError(f"{url}: {e.message or f'status {e.status}'}", *hint) from None
    except (NoAnswer, ValueError, LookupError, TypeError) as e:
        raise UsageError(f"no server answers at {url} ({e})", "octavo ps") from None


def _show(found: list[Any], as_json: bool) -> None:
    if as_json:
        return say_json(found)
    columns = ("model", "replica", "state", "pid", "running", "waiting", "restarts")
    table([tuple(each[c] for c in columns) for each in found], columns, right=(3, 4, 5, 6))


@click.group()
def replica() -> None:
    """List, drain and restart the replicas of a server's models (octavo serve --replicas)."""


@replica.command(name="list")
@at_server
def list_replicas(url: str, admin_key: str | None, as_json: bool) -> None:
    """List the engines of a server's models."""
    _show(ask(url, admin_key, "/v1/replicas"), as_json)


def _changing(name: str, text: str) -> None:
    """Adds a command that has a replica changed."""

    @replica.command(name=name, help=text)
    @click.argument("replica")
    @click.option("--model", help="Of several models that are served.")
    @click.option(
        "--seconds", type=Number(0, 86_400), default=30.0, show_default=True, metavar="X",
        help="Time to end what it has, which then goes on at others.",
    )  # fmt: skip
    @at_server
    def command(
        replica: str, model: str | None, seconds: float, url: str, admin_key: str | None,
        as_json: bool,
    ) -> None:  # fmt: skip
        body = {"replica": replica, "seconds": seconds} | ({"model": model} if model else {})
        _show(ask(url, admin_key, f"/v1/replicas/{name}", body), as_json)


_changing("drain", "Give REPLICA nothing new; returns when it has nothing left.")
_changing("resume", "Give REPLICA requests again.")
_changing("restart", "Drain REPLICA and give it a new engine; returns when that is ready.")


@click.group()
def route() -> None:
    """Say why requests went where they went."""


@route.command()
@click.option("--last", type=count(), default=5, show_default=True, metavar="N", help="Requests.")
@at_server
def explain(last: int, url: str, admin_key: str | None, as_json: bool) -> None:
    """Show the latest requests, and what each would have cost at every replica."""
    found = ask(url, admin_key, "/v1/routes")[-last:]
    if as_json:
        return say_json(found)
    rows = [row for number, made in enumerate(found, 1) for row in _rows(number, made)]
    heads = ("#", "prompt", "replica", "", "cached", "queue", "prefill", "images", "decode", "ms")
    table(rows, heads, right=(0, 1, 4, 5, 6, 7, 8, 9))


def _rows(number: int, made: dict[str, Any]) -> list[tuple[Any, ...]]:
    rows = []
    for each in made["candidates"]:
        cost = each["cost"]
        parts = [cost[name] for name in ("queue", "prefill", "images", "decode")]
        chosen = f"← {made['why']}" if each["replica"] == made["replica"] else ""
        if each["state"] != "up" or each["barred"]:
            chosen = "left out" if each["state"] == "up" else each["state"]
        figures = [f"{part:,.1f}" for part in (*parts, sum(parts))]
        rows.append(
            (number, made["prompt_tokens"], each["replica"], chosen, cost["cached"], *figures)
        )
    return rows
