"""Experiments through a gateway: what is counted of requests, and what becomes of their bodies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp

from octavo.database import open_database
from octavo.experiments.store import ExperimentStore
from octavo.gateway.state import TABLES
from tests.api.test_releases import Client, gateway, sound

LOOK = 1.2  # seconds after which a gateway has read what there is


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
        async with gateway(file, default=sound()) as at, aiohttp.ClientSession() as session:
            client = Client(session, at)
            assert (await client.admin("POST", "/v1/experiments", given))[0] == 200
            await asyncio.sleep(LOOK)
            for i in range(30):
                await client.ask(user=f"user-{i:02}", **same)
            assert client.status.keys() == {200, 404}

    asyncio.run(test())
    totals = ExperimentStore(open_database(file, TABLES)).totals("x")
    found = {(key[0], one.total) for key, one in totals.items() if key[2] == "prompt_tokens"}
    assert {name for name, _ in found} == variants.keys()
    assert len({prompt for _, prompt in found}) == 1
