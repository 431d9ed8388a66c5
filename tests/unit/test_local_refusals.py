"""What a gateway says of a local model that cannot be planned: as of its own configuration."""

from __future__ import annotations

import asyncio

import pytest

from octavo.errors import UsageError
from octavo.gateway.config import LocalModel
from octavo.gateway.local import LocalPool, LocalServers
from octavo.gateway.upstreams import Upstreams


@pytest.mark.parametrize(
    ("local", "says", "hints"),
    [
        (LocalModel(model="nosuchmodel"), 'no model named "nosuchmodel"', ("model: smollm2",)),
        (LocalModel(model="smollm2", memory="20GiBi", kv_dtype="int8"),
         "--memory '20GiBi' is not an amount", ("memory: 8GiB", "memory: 75%")),
        (LocalModel(model="no/such-model"), "cannot fetch no/such-model", ("octavo models",)),
    ],
)  # fmt: skip
def test_a_plan_that_fails(local: LocalModel, says: str, hints: tuple[str, ...]) -> None:
    pool = LocalPool(LocalServers(Upstreams()), "small", local)
    with pytest.raises(UsageError) as e:
        asyncio.run(pool.look())
    assert str(e.value).startswith(f"pools.small.local: {says}") and "try:" not in str(e.value)
    assert e.value.suggestions == hints
