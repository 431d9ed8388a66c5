"""What a gateway counts of answers that nobody has read to their end."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from octavo.server.window import ScrapeWindow, read
from octavo.simulate.engine import Speed
from octavo.simulate.server import Simulated, SimulatedServer
from tests.api.test_releases import gateway

TOKENS = "octavo_tokens_total"


@pytest.mark.parametrize("fields", [{}, {"n": 2}])  # followed by tokens, and by chunks
def test_who_leaves_a_stream_has_used_what_it_gave(fields: dict[str, int]) -> None:
    """Else limits in tokens would be for those alone who read to the end."""
    slow = SimulatedServer(Simulated("m", 0, Speed(1e6, 0.01, 64)))

    async def test() -> None:
        async with gateway(default=slow) as at, aiohttp.ClientSession() as session:

            async def counted(direction: str) -> float:
                async with session.get(f"{at}/metrics") as response:
                    found = ScrapeWindow({}, read(await response.text()), 1)
                where = {"outcome": ("cancelled",), "direction": (direction,)}
                return found.last(TOKENS, "", **where).get("", -1.0)

            body = {"model": "m", "prompt": "x" * 400, "stream": True, "max_tokens": 4000}
            async with session.post(f"{at}/v1/completions", json=body | fields) as response:
                for _ in range(20):  # lines, of which every other one is empty
                    await response.content.readline()
            async with asyncio.timeout(20):
                while (given := await counted("output")) < 0:
                    await asyncio.sleep(0.05)
            assert 5 <= given < 400 and await counted("input") == 101

    asyncio.run(test())
