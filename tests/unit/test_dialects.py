"""A second dialect: translations and a table, and no engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.checkpoint import open_checkpoint
from octavo.engine.events import Ended
from octavo.errors import InvalidValue, RequestError
from octavo.generate.prepare import PreparedRequest
from octavo.generate.reply import TextDelta, Usage
from octavo.generate.request import GenerationRequest, Sampling
from octavo.server.dialect import (
    Dialect,
    EmbedRoute,
    GenerateRoute,
    ModelCard,
    ModelsRoute,
    ScoreRoute,
    TextRoute,
)
from octavo.server.dialects import DIALECTS
from octavo.server.guard import Access
from octavo.server.parsing import Fields
from octavo.text import Tokenizer, load_tokenizer
from tests.unit.fake_models import Listener, ScriptedClient, fake_model, listening


class TellBody(msgspec.Struct, kw_only=True):
    """Streams unless told otherwise, as some servers do."""

    beginning: str
    model: str | None = None
    words: int = 8
    at_once: bool = False


class TextBody(msgspec.Struct, kw_only=True):
    text: str
    model: str | None = None


class Lines:
    """A JSON object a line."""

    media_type = "application/x-ndjson"

    def __init__(self, body: TellBody, job: PreparedRequest, usage: Usage) -> None:
        self.stream = not body.at_once
        self._name, self._usage = job.model.name, usage

    def opening(self) -> bytes:
        return self._line(teller=self._name)

    def chunks(self, delta: TextDelta) -> bytes:
        return self._line(told=delta.text)

    def closing(self) -> bytes:
        return self._line(words=self._usage.completion)

    def failure(self, error: RequestError) -> bytes:
        return self._line(complaint=str(error), about=error.param)

    def whole(self, choices: Sequence[Sequence[TextDelta]]) -> bytes:
        return self._line(told="".join(d.text for d in choices[0]), teller=self._name)

    def _line(self, **values: Any) -> bytes:
        return msgspec.json.encode(values) + b"\n"


def tell(body: TellBody) -> GenerationRequest:
    if body.words < 1:
        raise InvalidValue("words is below 1", "words")
    return GenerationRequest(prompts=[body.beginning], sampling=Sampling(max_tokens=body.words))


def error_body(error: RequestError) -> bytes:
    return msgspec.json.encode({"complaint": str(error), "about": error.param})


def names(body: Any) -> dict[str, str]:
    return {"prompts": "beginning", "max_tokens": "words"}


def told(cards: Sequence[ModelCard]) -> bytes:
    return msgspec.json.encode([card.name for card in cards])


TALES = Dialect(
    Fields(frozenset({"mood"}), {"voice": ()}),
    error_body,
    (
        GenerateRoute("/tales/tell", TellBody, tell, Lines, names=names),
        EmbedRoute(
            "/tales/place", TextBody, lambda body: [body.text],
            lambda body, served, vectors, tokens: msgspec.json.encode(vectors[0].tolist()),
            names=lambda _: {"inputs": "text"},
        ),
        ScoreRoute(
            "/tales/like", TextBody, lambda body: [(body.text, body.text)],
            lambda body, served, scores, tokens: msgspec.json.encode([scores[0], tokens]),
        ),
        TextRoute("/tales/shout", TextBody, lambda body, served: body.text.upper().encode()),
        ModelsRoute("/tales/tellers", told),
        ModelsRoute("/tales/tellers/{name}", told),
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(smollm2))


@pytest.fixture
def both(tokenizer: Tokenizer) -> Iterator[Listener]:
    with listening(fake_model(tokenizer, "ann", "Once upon"), dialects=(*DIALECTS, TALES)) as one:
        yield one


def test_its_requests_and_streams(both: Listener) -> None:
    status, text = both.ask("/tales/tell", {"beginning": "It was", "mood": "dark"})
    lines = [json.loads(line) for line in text.splitlines()]
    assert status == 200 and lines[0] == {"teller": "ann"}
    assert "".join(line["told"] for line in lines[1:-1]) == "Once upon"
    assert lines[-1] == {"words": len(lines) - 2}
    whole = both.json("/tales/tell", {"beginning": "It was", "at_once": True})
    assert whole == (200, {"told": "Once upon", "teller": "ann"})
    assert [(e.route, e.model, e.usage is None) for e in both.exchanges] == 2 * [
        ("/tales/tell", "ann", False)
    ]
    client = both.models.entry("ann").client
    assert isinstance(client, ScriptedClient)
    assert [r.params.max_tokens for r in client.requests] == [8, 8]


def test_its_errors(both: Listener) -> None:
    for body, about in (
        ({"beginning": "a", "words": 0}, "words"), ({"beginning": "a" * 50_000}, "beginning"),
        ({"beginning": "a", "voice": 1}, "voice"), ({"begining": "a"}, "begining"),
        ({"beginning": "a", "stream": True}, "stream"), ({"beginning": "a", "model": "b"}, "model"),
    ):  # fmt: skip
        status, reply = both.json("/tales/tell", body)
        assert (status, reply["about"]) == (404 if about == "model" else 400, about)
        assert set(reply) == {"complaint", "about"}
    assert set(both.json("/v1/completions", {})[1]) == {"error"}
    assert set(both.json("/nowhere", {})[1]) == {"error"}  # the first dialect's
    assert both.json("/tales/tell") == (
        405, {"complaint": "the route does not take this method", "about": None},
    )  # fmt: skip


def test_its_keys(tokenizer: Tokenizer) -> None:
    access = Access(api_keys=("a",))
    with listening(fake_model(tokenizer, "ann"), access=access, dialects=(TALES,)) as one:
        refused = {"complaint": "a valid API key is needed", "about": None}
        assert one.json("/tales/tell", {"beginning": "a"}) == (401, refused)
        assert one.ask("/tales/tell", {"beginning": "a"}, authorization="Bearer a")[0] == 200


def test_its_other_routes(both: Listener) -> None:
    assert both.ask("/tales/shout", {"text": "hi"}) == (200, "HI")
    assert both.json("/tales/tellers") == both.json("/tales/tellers/ann") == (200, ["ann"])
    assert both.json("/tales/tellers/bob")[1]["about"] == "model"
    first, second = both.json("/tales/place", {"text": "hi"})[1]
    assert second == 1 and first >= 1
    score, tokens = both.json("/tales/like", {"text": "hi"})[1]
    assert score == pytest.approx(1) and tokens == first
    assert both.json("/tales/place", {"text": "a" * 50_000})[1]["about"] == "text"


def test_a_failing_stream(tokenizer: Tokenizer) -> None:
    client = ScriptedClient(tokenizer.encode("Once", add_bos=False), Ended("", "error"))
    model = fake_model(tokenizer, "ann", client=client)
    with listening(model, dialects=(TALES,)) as one:
        status, text = one.ask("/tales/tell", {"beginning": "a"})
    last = json.loads(text.splitlines()[-1])
    assert status == 200 and last["complaint"] == "the engine could not compute this request"
    assert one.exchanges[0].status == 500
