"""`reasoning_effort` and `verbosity` go to templates that read them; others refuse them by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.checkpoint import open_checkpoint
from octavo.text import Tokenizer, load_tokenizer
from tests.unit.dialects import TEMPLATE, scripted, speaking
from tests.unit.fake_models import Listener, ScriptedClient

HI = [{"role": "user", "content": "hi"}]
READS = "{% if verbosity is defined %}Be {{ verbosity }}.{% endif %}" + TEMPLATE
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(smollm2))


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Listener]:
    models = (
        scripted(tokenizer, "ann", "Once", shows=READS),
        scripted(tokenizer, "bob", "Once", shows=PLAIN),
    )
    with speaking(*models) as one:
        yield one


def prompt(server: Listener, path: str, body: dict[str, Any], model: str = "ann") -> str:
    client = server.models.entry(model).client
    assert isinstance(client, ScriptedClient)
    client.requests.clear()
    status, reply = server.json(path, body | {"model": model})
    assert status == 200, reply
    return server.models.get(model).tokenizer.decode(client.requests[0].prompt)


def test_what_a_template_reads_it_is_given(server: Listener) -> None:
    chat, said = "/v1/chat/completions", {"messages": HI}
    assert "Effort: high" in prompt(server, chat, said | {"reasoning_effort": "high"})
    assert prompt(server, chat, said | {"verbosity": "low"}).startswith("Be low.")
    both = prompt(server, chat, said | {"verbosity": "high", "reasoning_effort": "low"})
    assert both.startswith("Be high.") and "Effort: low" in both
    asked = {"input": "hi", "text": {"verbosity": "low"}}
    assert prompt(server, "/v1/responses", asked).startswith("Be low.")


def test_what_asks_for_nothing_is_taken_by_all(server: Listener) -> None:
    chat, said = "/v1/chat/completions", {"messages": HI}
    for model in ("ann", "bob"):
        plain = prompt(server, chat, said, model)
        for more in ({"reasoning_effort": "none"}, {"verbosity": "medium"}, {"verbosity": None}):
            assert prompt(server, chat, said | more, model) == plain


def test_templates_that_do_not_read_it_refuse_it(server: Listener) -> None:
    chat, said = "/v1/chat/completions", {"messages": HI, "model": "bob"}
    for path, body, name in (
        (chat, said | {"reasoning_effort": "high"}, "reasoning_effort"),
        (chat, said | {"verbosity": "low"}, "verbosity"),
        (
            "/v1/responses",
            {"input": "hi", "model": "bob", "text": {"verbosity": "low"}},
            "text.verbosity",
        ),
    ):
        status, reply = server.json(path, body)
        assert (status, reply["error"]["param"]) == (400, name)
        assert reply["error"]["message"] == f"{name}: the chat template of bob does not read it"
        assert reply["error"]["code"] == "unsupported_parameter"
