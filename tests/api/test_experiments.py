"""Experiments through a gateway: what is counted of requests, and what becomes of their bodies."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import msgspec
import pytest
from click.testing import CliRunner
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.cli.experiment import experiment
from octavo.database import open_database
from octavo.experiments.store import ExperimentStore
from octavo.gateway.state import TABLES
from tests.api.test_releases import ADMIN, Client, gateway, sound


def test_no_variant_changes_what_explains_its_numbers(tmp_path: Path) -> None:
    """Equal prompts are equal covariates, whatever a variant puts before them, and if it fails."""
    file = str(tmp_path / "state.sqlite3")
    variants = {
        "a": {"weight": 30}, "longer": {"weight": 30, "prompt_prefix": "Be brief. " * 50},
        "failing": {"weight": 40, "model": "nobody"},
    }  # fmt: skip
    given = {"id": "x", "model": "m", "control": "a", "variants": variants}
    same = {"messages": [{"role": "user", "content": "Hello there, how are you?"}]}

    async def test() -> None:
        pools = {"default": sound(), "next": sound("nobody")}  # which requests for it do not go to
        async with gateway(file, **pools) as at, aiohttp.ClientSession() as session:
            client = Client(session, at)
            assert (await client.admin("POST", "/v1/experiments", given))[0] == 200
            for i in range(30):
                await client.ask(user=f"user-{i:02}", **same)
            assert client.status.keys() == {200, 404}

    asyncio.run(test())
    totals = ExperimentStore(open_database(file, TABLES)).totals("x")
    found = {(key[0], one.total) for key, one in totals.items() if key[2] == "prompt_tokens"}
    assert {name for name, _ in found} == variants.keys()
    assert len({prompt for _, prompt in found}) == 1


class Echo:
    """A server of whose answers each says what it was asked."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        body = (await receive())["body"]
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@pytest.mark.parametrize(("path", "field"), [("/tokenize", "prompt"), ("/v1/embeddings", "input")])
def test_what_writes_no_text_gets_nothing_of_a_variant_but_its_model(path: str, field: str) -> None:
    """Tokens of a text that was not sent, or fields that no such route takes."""
    changed = {"model": "m", "set": {"temperature": 0.25}, "prompt_prefix": "Be brief. "}
    variants = {"a": {"weight": 1}, "b": {"weight": 99} | changed}
    given = {"id": "x", "model": "m", "control": "a", "variants": variants}

    async def test() -> None:
        async with gateway(default=Echo(sound())) as at, aiohttp.ClientSession() as session:
            client = Client(session, at)
            assert (await client.admin("POST", "/v1/experiments", given))[0] == 200
            had = set()
            for i in range(20):
                body = {"model": "m", field: "Hello", "user": f"user-{i}"}
                async with session.post(at + path, json=body) as response:
                    assert msgspec.json.decode(await response.read()) == body
                    had.add(response.headers["x-variant"])
            assert "b" in had
            async with session.post(f"{at}/v1/completions", json={"model": "m", "prompt": "Hello", "user": "user-1"}) as response:  # fmt: skip
                assert response.headers["x-variant"] == "b"
                said = msgspec.json.decode(await response.read())
                assert (said["prompt"], said["temperature"]) == ("Be brief. Hello", 0.25)

    asyncio.run(test())


@pytest.mark.parametrize("value", [1e13, -1e308])
def test_no_client_can_make_sums_of_feedback_infinite(value: float) -> None:
    """A database refuses these, and with them all that was seen beside them."""
    variants = {"a": {"weight": 50}, "b": {"weight": 50}}
    given = {"id": "x", "model": "m", "control": "a", "variants": variants, "metrics": ["thumbs"]}

    async def test() -> None:
        async with gateway(default=sound()) as at, aiohttp.ClientSession() as session:
            client = Client(session, at)
            assert (await client.admin("POST", "/v1/experiments", given))[0] == 200
            told = {"experiment": "x", "metric": "thumbs", "user": "ann", "value": 1e12}
            assert (await client.admin("POST", "/v1/feedback", told))[0] == 200
            status, error = await client.admin("POST", "/v1/feedback", told | {"value": value})
            assert (status, error["error"]["param"]) == (400, "value")

    asyncio.run(test())


def test_who_asks_is_told_that_the_database_is_away(tmp_path: Path) -> None:
    file = tmp_path / "state.sqlite3"
    variants = {"a": {"weight": 50}, "b": {"weight": 50}}
    given = {"id": "x", "model": "m", "control": "a", "variants": variants}
    asked = [
        ("GET", "/v1/releases", None), ("POST", "/v1/releases/rollback", {"model": "m"}),
        ("POST", "/v1/experiments", given), ("GET", "/v1/experiments/x/report", None),
        ("POST", "/v1/experiments/x/stop", {}),
    ]  # fmt: skip

    async def test() -> None:
        async with gateway(str(file), default=sound()) as at, aiohttp.ClientSession() as session:
            client = Client(session, at)
            file.rename(tmp_path / "moved")
            for method, path, body in asked:
                status, error = await client.admin(method, path, body)
                assert (status, error["error"]["code"]) == (503, "database")
                assert "state.sqlite3 cannot be used" in error["error"]["message"]

    asyncio.run(test())


def test_commands_list_experiments_and_change_their_shares(tmp_path: Path) -> None:
    given = {"id": "x", "model": "m", "control": "a", "metrics": ["ttft", "thumbs"],
             "variants": {"a": {"weight": 50}, "b": {"weight": 10}}}  # fmt: skip
    file = tmp_path / "x.yaml"
    file.write_text(json.dumps(given))

    async def test() -> None:
        async with gateway(default=sound()) as at:
            for words, code, says in (
                (("list",), 0, "no experiment yet"),
                (("start", str(file)), 0, "x has begun: a 50 %, b 10 %"),
                (("shares", "x", "b=40", "a=50"), 0, "x from now on: b 40 %, a 50 %"),
                (("shares", "x", "b=many"), 1, "'b=many' are no weights"),
                (("shares", "x", "c=4"), 1, "c"),
                (("list",), 0, "x   m      runs   a 50 %, b 40 %"),
                (
                    ("report", "x"),
                    0,
                    "too few units yet, or none that differ: ttft of b, thumbs of b",
                ),
                (("stop", "x"), 0, "x has ended"),
                (("list",), 0, "ended"),
            ):
                words = (*words, "--server", at, "--admin-key", ADMIN)
                result = await asyncio.to_thread(CliRunner().invoke, experiment, words)
                said = result.output + str(result.exception or "")
                assert (result.exit_code, says in said) == (code, True), said

    asyncio.run(test())
