"""Adapters by name, and the requests that use them."""

from __future__ import annotations

from octavo.client.adapter_table import Adapter, AdapterTable
from octavo.client.replay import Stream
from octavo.engine.request import Request, SamplingParams


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
