"""octavo replica, octavo route."""

from __future__ import annotations

from typing import Any

import click

from octavo.cli.numbers import Number, count
from octavo.cli.options import json_flag
from octavo.cli.remote import find_server, server_options
from octavo.cli.screen import say_json, table


def _show(found: list[Any], as_json: bool) -> None:
    if as_json:
        return say_json(found)
    columns = ("model", "replica", "state", "pid", "running", "waiting", "restarts")
    table([tuple(each[c] for c in columns) for each in found], columns, right=(3, 4, 5, 6))


@click.group()
def replica() -> None:
    """List, drain and restart the replicas of a server's models (octavo serve --replicas)."""


@replica.command(name="list")
@server_options
@json_flag
def list_replicas(server: str | None, admin_key: str | None, as_json: bool) -> None:
    """List the engines of a server's models."""
    _show(find_server(server, admin_key).listed("/v1/replicas"), as_json)


def _changing(name: str, text: str) -> None:
    """Adds a command that has a replica changed."""

    @replica.command(name=name, help=text)
    @click.argument("replica")
    @click.option("--model", metavar="MODEL", help="Of several models that are served.")
    @click.option(
        "--seconds", type=Number(0, 86_400), metavar="SECONDS", default=30, show_default=True,
        help="Time to end what it has, which then goes on at others.",
    )  # fmt: skip
    @server_options
    @json_flag
    def command(
        replica: str, model: str | None, seconds: float, server: str | None, admin_key: str | None,
        as_json: bool,
    ) -> None:  # fmt: skip
        body = {"replica": replica, "seconds": seconds} | ({"model": model} if model else {})
        found = find_server(server, admin_key).listed(f"/v1/replicas/{name}", body)
        _show(found, as_json)


_changing("drain", "Give REPLICA nothing new; returns when it has nothing left.")
_changing("resume", "Give REPLICA requests again.")
_changing("restart", "Drain REPLICA and give it a new engine; returns when that is ready.")


@click.group()
def route() -> None:
    """Say why requests went where they went."""


@route.command()
@click.option("--last", type=count(), default=5, show_default=True, help="How many requests.")
@server_options
@json_flag
def explain(last: int, server: str | None, admin_key: str | None, as_json: bool) -> None:
    """Show the latest requests, and what each would have cost at every replica."""
    found = find_server(server, admin_key).listed("/v1/routes")[-last:]
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
