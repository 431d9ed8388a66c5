"""Commands and routes that start releases and experiments: what they refuse, and what they say."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.cli.experiment import experiment
from octavo.cli.release import release
from octavo.errors import OctavoError
from tests.api.test_releases import Client, gateway, run, sound


def test_commands(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateway(default=sound(), next=sound()) as at:

            async def do(*words: str) -> str:
                return await asyncio.to_thread(run, release, at, *words)

            assert "no release" in await do("status")
            with pytest.raises(OctavoError, match="no upstream is in the pool 'nxt'"):
                await do("start", "m", "--canary", "nxt")
            assert "gets 0.02 of" in await do(
                "start", "m", "--canary", "next", "--steps", "2,50,100"
            )
            with pytest.raises(OctavoError, match="not ended"):
                await do("start", "m", "--canary", "next")
            assert "error_rate > 0.01" in await do("status", "m")
            assert "paused, step 1" in await do("pause", "m")
            assert "running, step 1" in await do("resume", "m")
            assert "running, step 2" in await do("promote", "m")
            assert "rolled_back" in await do("rollback", "m")
            with pytest.raises(OctavoError, match="rolled back already"):
                await do("promote", "m", "--full")
            status = await do("status", "m")
            assert "rollback by admin" in status and "stable 1" in status
            assert "admin: step 2  promote by admin" in status

    asyncio.run(test())


def test_a_release_after_another_begins_where_that_has_ended() -> None:
    async def test() -> None:
        async with gateway(default=sound(), next=sound(), third=sound()) as at:

            async def do(*words: str) -> str:
                return await asyncio.to_thread(run, release, at, *words)

            assert "requests for m, default the others" in await do("start", "m", "--canary=next")
            await do("promote", "m", "--full")
            with pytest.raises(OctavoError, match="stable 'next', canary 'next'$"):
                await do("start", "m", "--canary=next")
            assert "requests for m, next the others" in await do("start", "m", "--canary=third")
            await do("rollback", "m")
            assert "default gets 1 of" in await do("start", "m", "--canary=default", "--steps=100")

    asyncio.run(test())


def test_who_was_promoted_is_told_the_way_back() -> None:
    async def test() -> None:
        async with gateway(default=sound(), next=sound()) as at:

            async def do(*words: str) -> str:
                return await asyncio.to_thread(run, release, at, *words)

            await do("start", "m", "--canary=next")
            await do("promote", "m", "--full")
            with pytest.raises(OctavoError, match="promoted already") as e:
                await do("rollback", "m")
            assert e.value.suggestions == ("octavo release start m --canary default --steps 100",)
            await do(*e.value.suggestions[0].split()[2:])
            await do("rollback", "m")
            with pytest.raises(OctavoError, match="rolled back already") as e:
                await do("rollback", "m")
            assert e.value.suggestions == ()

    asyncio.run(test())


class Deaf:
    """A server that answers nothing, not even questions about itself."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


class Ending:
    """A server that can end: then nobody is asked any more. answers: whether it has not."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self.answers = app, True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._app if self.answers else Deaf())(scope, receive, send)


def test_a_version_that_does_not_answer_gets_no_requests() -> None:
    async def test() -> None:
        ending = Ending(sound())
        async with (
            gateway(default=sound(), next=ending, deaf=Deaf()) as at,
            aiohttp.ClientSession() as session,
        ):
            client = Client(session, at)

            async def do(*words: str) -> str:
                return await asyncio.to_thread(run, release, at, *words)

            async def down() -> bool:
                found = (await client.admin("GET", "/v1/upstreams"))[1]["upstreams"]
                return {u["pool"]: u["state"] for u in found}["next"] == "down"

            with pytest.raises(OctavoError, match="no upstream of pool 'deaf' answers: upstream"):
                await do("start", "m", "--canary=deaf")
            await do("start", "m", "--canary=next")
            ending.answers = False
            async with asyncio.timeout(30):
                while not await down():
                    await asyncio.sleep(0.1)
            for full in ([], ["--full"]):
                with pytest.raises(OctavoError, match="no upstream of pool 'next' answers"):
                    await do("promote", "m", *full)
            assert "m: running, step 1" in await do("status", "m")
            assert "rolled_back" in await do("rollback", "m")

    asyncio.run(test())


def test_models_that_nobody_serves_are_refused() -> None:
    async def test() -> None:
        async with (
            gateway(default=sound(), next=sound("other")) as at,
            aiohttp.ClientSession() as session,
        ):
            client = Client(session, at)

            async def refused(path: str, given: dict[str, Any]) -> str:
                status, body = await client.admin("POST", path, given)
                assert (status, body["error"]["param"]) == (404, "model")
                return str(body["error"]["message"])

            given = {"model": "mm", "canary": "next"}
            said = await refused("/v1/releases", given)
            assert said == "no upstream of the pool 'default' serves 'mm'; known models: m"
            said = await refused("/v1/releases", given | {"model": "m"})
            assert said == "no upstream of the pool 'next' serves 'm'; known models: other"
            variants = {"a": {"weight": 50}, "b": {"weight": 50, "model": "nobody"}}
            tried = {"id": "x", "model": "m", "control": "a", "variants": variants}
            said = await refused("/v1/experiments", tried)
            assert said == "no upstream serves 'nobody'; known models: m, other"
            said = await refused("/v1/experiments", tried | {"model": "mm"})
            assert said == "no upstream serves 'mm'; known models: m, other"
            variants["b"]["model"] = "other"
            assert (await client.admin("POST", "/v1/experiments", tried))[0] == 200

    asyncio.run(test())


def test_nobody_answers() -> None:
    with pytest.raises(OctavoError, match="http://127.0.0.1:1 does not answer"):
        run(release, "http://127.0.0.1:1", "status")


def test_a_plan() -> None:
    result = CliRunner().invoke(experiment, ["plan", "--rate", "0.1", "--effect", "0.1", "--per-day", "5000"])  # fmt: skip
    assert result.output.startswith("56,498 units of both variants together, 11.3 days")
    assert "(29,504 with one look" in result.output
    assert result.output.endswith("\nin its file: horizon: 56498\n")
