"""Adapters by name, and the requests that use them."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from octavo.client.adapter_table import Adapter, AdapterTable
from octavo.client.link import EngineLink
from octavo.client.process import EngineProcessClient
from octavo.client.protocol import LoadAdapter, UnloadAdapter
from octavo.client.replay import Stream
from octavo.client.replicas import Replicas
from octavo.engine.request import Request, SamplingParams
from octavo.errors import RequestError


def test_a_request_whose_adapter_was_lost_does_not_count_for_the_next_of_its_name() -> None:
    """Which may be loaded before the client of that request has read its error."""
    table = AdapterTable()
    first, second = (
        Stream.of(Request(id=id, prompt=[1], params=SamplingParams(), adapter="a"), 0)
        for id in ("1", "2")
    )
    table.adapters["a"] = Adapter("old", {})
    table.acquire(first)
    del table.adapters["a"]
    table.adapters["a"] = new = Adapter("new", {})
    table.acquire(second)
    assert not table.release(first) and new.users == 1
    assert not table.leave("a") and table.release(second)
    assert not table.release(second) and table.adapters == {}


class Link:
    """To an engine that says nothing."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: object) -> None:
        self.sent.append(message)


def test_who_no_longer_waits_for_an_adapter_leaves_none_behind() -> None:
    """An engine would keep it, and refuse its name ever after."""

    async def run() -> None:
        table, link = AdapterTable(), Link()
        loading = asyncio.create_task(table.load(cast(EngineLink, link), "a", Adapter("x", {})))
        await asyncio.sleep(0)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert link.sent == [LoadAdapter(0, "a", "x", {}), UnloadAdapter("a")]

    asyncio.run(run())


def test_who_no_longer_waits_for_an_adapter_leaves_it_at_no_replica() -> None:
    class Client:
        """One that loads at once, or never."""

        def __init__(self, loads: bool) -> None:
            self.loads, self.adapters = loads, list[str]()

        async def load_adapter(self, name: str, path: str) -> None:
            if not self.loads:
                await asyncio.Event().wait()
            self.adapters.append(name)

        async def unload_adapter(self, name: str) -> None:
            if name not in self.adapters:
                raise RequestError("no such adapter")
            self.adapters.remove(name)

    async def run() -> None:
        clients = [Client(True), Client(True), Client(False)]
        pool = Replicas(cast(list[EngineProcessClient], clients))
        loading = asyncio.create_task(pool.load_adapter("a", "x"))
        await asyncio.sleep(0)
        assert [client.adapters for client in clients] == [["a"], ["a"], []]
        clients[0].adapters.clear()  # an engine that came anew could not load it again
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert [client.adapters for client in clients] == [[], [], []]

    asyncio.run(run())
