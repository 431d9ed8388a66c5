"""Names to models: several at once, aliases, adapters, and what is still loading."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from starlette.requests import Request
from starlette.types import Message

from octavo.checkpoint.pooling import Pooling
from octavo.client.base import EngineClient
from octavo.engine.request import SamplingParams
from octavo.errors import InvalidValue, Overloaded, RequestError, UsageError
from octavo.generate.model import ServedModel
from octavo.server.exchange import exchange
from octavo.server.models import leased, model_cards
from octavo.server.registry import NotFound, Registry
from octavo.server.sizes import SizeBounds
from tests.unit.asgi import scope


class Client:
    """Only what a registry looks at."""

    def __init__(self, *adapters: str) -> None:
        self.adapters = list(adapters)
        self.ready = True
        self.closed = 0
        self.stats: dict[str, int] = {}

    async def close(self) -> None:
        self.closed += 1


def add(
    models: Registry, name: str, *aliases: str, client: Client | None = None, loaded: bool = True,
    context: int = 100,
) -> ServedModel:  # fmt: skip
    made = cast(EngineClient, client or Client())
    nothing: Any = None
    served = ServedModel(
        name=name, aliases=aliases, tokenizer=nothing, template=None, client=made,
        grammars=nothing, defaults=SamplingParams(), vocabulary=10 * context, context=context,
        created=0, task="generate", pooling=Pooling("mean", True),
    )  # fmt: skip
    entry = models.add(name, made, aliases)
    entry.model = served if loaded else None
    return served


def refusal(models: Registry, name: str | None) -> RequestError:
    with pytest.raises(RequestError) as refused:
        models.get(name)
    return refused.value


def test_one_model_needs_no_name() -> None:
    models = Registry()
    served = add(models, "a", "x/a")
    assert models.get(None) is models.get("a") is models.get("x/a") is served
    assert str(refusal(models, "b")) == "no model 'b' here; this server has 'a'"


def test_several_models_must_be_named() -> None:
    models = Registry()
    first, second = add(models, "a"), add(models, "b", "x/b", context=50)
    assert models.get("a") is first and models.get("x/b") is second
    assert models.bounds("b") == SizeBounds(50, 500) and models.bounds("a") == SizeBounds(100, 1000)
    error = refusal(models, None)
    assert (type(error), error.status, error.param) == (InvalidValue, 400, "model")
    assert str(error) == "model must be given; this server has 'a', 'b'"
    error = refusal(models, "c")
    assert (type(error), error.status, error.code) == (NotFound, 404, "model_not_found")


def test_names_are_unique() -> None:
    models = Registry()
    add(models, "a", "x/a", client=Client("tuned"))
    for name, *aliases in (("a",), ("x/a",), ("tuned",), ("b", "a")):
        with pytest.raises(UsageError, match="two models are called"):
            models.add(name, cast(EngineClient, Client()), aliases)
    assert [entry.name for entry in models] == ["a"]


def test_errors_name_few_models() -> None:
    models = Registry()
    for i in range(20):
        add(models, f"m{i}")
    assert str(refusal(models, None)).endswith("'m6', 'm7' and 12 more")


def test_adapters_are_models() -> None:
    models = Registry()
    add(models, "a")
    second = add(models, "b", client=Client("tuned", "other"))
    tuned = models.get("tuned")
    assert (tuned.name, tuned.adapter, tuned.client) == ("tuned", "tuned", second.client)
    assert models.entry("tuned").name == "b"
    cards = [(c.name, c.served and c.served.adapter, c.parent) for c in model_cards(models)]
    assert cards == [
        ("a", "", None), ("b", "", None), ("tuned", "tuned", "b"), ("other", "other", "b"),
    ]  # fmt: skip
    assert models.adapter_client("other") is second.client
    with pytest.raises(InvalidValue, match="no adapter 'b'"):
        models.adapter_client("b")


def test_models_that_are_loading() -> None:
    models = Registry()
    with pytest.raises(Overloaded, match="loading"):
        models.check_loaded()
    add(models, "a", loaded=False)
    with pytest.raises(Overloaded, match="loading"):
        models.check_loaded()
    # A name that nobody knows yet may be an adapter's that comes with the model.
    assert [refusal(models, name).code for name in (None, "a", "tuned")] == 3 * ["loading"]
    add(models, "b")
    models.check_loaded()
    assert models.get("b").name == "b" and refusal(models, "a").status == 503
    assert [card.name for card in model_cards(models)] == ["b"]


def test_states_and_readiness() -> None:
    models, client = Registry(), Client()
    assert not models.ready
    add(models, "a")
    served = add(models, "b", client=client, loaded=False)
    assert [e.state for e in models] == ["ready", "loading"] and not models.ready
    models.entry("b").model = served
    assert [e.state for e in models] == ["ready", "ready"] and models.ready
    client.ready = False
    assert [e.state for e in models] == ["ready", "unavailable"] and not models.ready
    client.ready = True
    models.check_open()
    models.draining = True
    assert not models.ready
    with pytest.raises(Overloaded, match="shutting down"):
        models.check_open()


def test_models_come_and_go() -> None:
    models, first, second = Registry(), Client(), Client()
    add(models, "a", client=first)
    add(models, "b", client=second)
    assert cast(Client, models.remove("a").client) is first
    assert models.get(None).name == "b" and refusal(models, "a").status == 404
    assert not models.taken("a")
    add(models, "a")
    asyncio.run(models.close())
    assert (first.closed, second.closed) == (0, 1)


@pytest.mark.parametrize("steps", range(6))
def test_a_lease_ends_with_its_exchange(steps: int) -> None:
    """Wherever a request is cancelled, its model can be unloaded afterwards."""
    models = Registry()
    add(models, "a")

    async def gone() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def test() -> None:
        asked = scope()
        asking = asyncio.create_task(leased(Request(asked, gone), models, "a"))
        for _ in range(steps):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        exchange(asked).finish()

    asyncio.run(test())
    assert models.entry("a").users == 0
