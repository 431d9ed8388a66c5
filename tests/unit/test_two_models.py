"""Two models in one server, on clients that no handler knows."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.backends.base import BLOCK
from octavo.checkpoint import open_checkpoint
from octavo.client.adapter_table import AdapterTable
from octavo.client.replay import Stream
from octavo.engine.events import Ended, TokenEvent
from octavo.engine.request import Request, SamplingParams
from octavo.errors import RequestError
from octavo.generate.prepare import prepare
from octavo.server import runner
from octavo.server.guard import Access
from octavo.text import ChatTemplate, Tokenizer, load_tokenizer
from tests.unit.fake_models import Listener, ScriptedClient, fake_model, listening, template_of
from tests.waiting import until

HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(smollm2))


@pytest.fixture(scope="module")
def template(smollm2: Path, tokenizer: Tokenizer) -> Iterator[ChatTemplate]:
    with template_of(smollm2, tokenizer) as made:
        yield made


@pytest.fixture
def two(tokenizer: Tokenizer, template: ChatTemplate) -> Iterator[Listener]:
    """`red` can chat, `blue` has no template and a larger context."""
    red = fake_model(tokenizer, "red", "I am red.", template=template)
    with listening(red, fake_model(tokenizer, "blue", "blue", context=256)) as one:
        yield one


def client_of(one: Listener, name: str) -> ScriptedClient:
    return cast(ScriptedClient, one.models.entry(name).client)


def test_each_answers_under_its_names(two: Listener) -> None:
    api = openai.OpenAI(base_url=f"http://127.0.0.1:{two.port}/v1", api_key="none")
    for name in ("red", "org/red"):
        chat = api.chat.completions.create(model=name, messages=HELLO)  # type: ignore[arg-type]
        assert (chat.model, chat.choices[0].message.content) == ("red", "I am red.")
    for name in ("blue", "org/blue"):
        text = api.completions.create(model=name, prompt="hi")
        assert (text.model, text.choices[0].text) == ("blue", "blue")
    streamed = api.chat.completions.create(model="red", messages=HELLO, stream=True)  # type: ignore[arg-type]
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == "I am red."
    cards = {m.id: cast(Any, m).max_model_len for m in api.models.list()}
    assert cards == {"red": 64, "blue": 256}
    assert api.models.retrieve("org/blue").id == "blue"
    assert {cast(Any, m).cache_tokens for m in api.models.list()} == {8 * BLOCK}
    assert [len(client_of(two, name).requests) for name in ("red", "blue")] == [3, 2]


def test_a_request_without_a_model_is_told_which_there_are(two: Listener) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "hi"}),
        ("/tokenize", {"prompt": "hi"}), ("/v1/embeddings", {"input": "a"}),
    ):  # fmt: skip
        status, reply = two.json(path, body)
        assert (status, reply["error"]["param"]) == (400, "model")
        assert reply["error"]["message"] == "model must be given; this server has 'red', 'blue'"
    status, reply = two.json("/v1/completions", {"model": "green", "prompt": "hi"})
    assert (status, reply["error"]["code"]) == (404, "model_not_found")


def test_capabilities_and_bounds_are_each_models_own(two: Listener) -> None:
    status, reply = two.json("/v1/chat/completions", {"model": "blue", "messages": HELLO})
    assert (status, reply["error"]["code"]) == (400, "no_chat_template")
    prompt = [5] * 100
    assert two.json("/v1/completions", {"model": "blue", "prompt": prompt})[0] == 200
    status, reply = two.json("/v1/completions", {"model": "red", "prompt": prompt})
    assert (status, reply["error"]["param"]) == (400, "prompt")
    assert "maximum context length is 64 tokens" in reply["error"]["message"]
    many = [5] * 40_000  # more than is decoded without a look at its size
    status, reply = two.json("/v1/completions", {"model": "blue", "prompt": many})
    assert "maximum context length is 256 tokens" in reply["error"]["message"]
    assert two.json("/v1/completions", {"model": "green", "prompt": many})[0] == 404


def test_one_loads_while_the_other_serves(two: Listener) -> None:
    entry = two.models.entry("blue")
    model, entry.model = entry.model, None
    assert two.json("/health") == (
        503, {"status": "not ready", "models": {"loading": 1, "ready": 1}},
    )  # fmt: skip
    status, reply = two.json("/v1/completions", {"model": "blue", "prompt": "hi"})
    assert (status, reply["error"]["code"]) == (503, "loading")
    assert two.json("/v1/chat/completions", {"model": "red", "messages": HELLO})[0] == 200
    assert [m["id"] for m in two.json("/v1/models")[1]["data"]] == ["red"]
    entry.model = model
    assert two.json("/health") == (200, {"status": "ready", "models": {"ready": 2}})
    assert two.json("/v1/completions", {"model": "blue", "prompt": "hi"})[0] == 200


def test_models_come_and_go_while_serving(two: Listener, tokenizer: Tokenizer) -> None:
    two.models.remove("red")
    assert two.json("/v1/completions", {"prompt": "hi"})[1]["model"] == "blue"
    assert two.json("/v1/completions", {"model": "red", "prompt": "hi"})[0] == 404
    green = fake_model(tokenizer, "green")
    two.models.add("green", green.client, green.aliases).model = green
    reply = two.json("/v1/completions", {"model": "org/green", "prompt": "hi"})[1]
    assert (reply["model"], reply["choices"][0]["text"]) == ("green", "green")


def test_metrics_and_logs_name_the_model(two: Listener) -> None:
    two.json("/v1/completions", {"model": "blue", "prompt": "hi", "n": 2})
    two.json("/v1/chat/completions", {"model": "red", "messages": HELLO})
    two.json("/v1/completions", {"model": "green", "prompt": "hi"})
    families = text_string_to_metric_families(two.ask("/metrics")[1])
    samples = {(s.name, s.labels.get("model_name")): s.value for f in families for s in f.samples}
    assert samples["octavo_request_finished_total", "blue"] == 2
    assert samples["octavo_request_finished_total", "red"] == 1
    assert samples["octavo_request_generation_tokens_count", "blue"] == 1
    for name in ("red", "blue"):
        assert samples["octavo_requests_running", name] == 0
        assert samples["octavo_engine_restarts_total", name] == 0
    assert [one.model for one in two.exchanges[:3]] == ["blue", "red", None]


def test_adapters_belong_to_one_model(
    tokenizer: Tokenizer, template: ChatTemplate, tmp_path: Path
) -> None:
    (tmp_path / "poems").mkdir()
    (tmp_path / "poems" / "adapter_config.json").write_text("{}")
    red, blue = fake_model(tokenizer, "red", template=template), fake_model(tokenizer, "blue")
    load = "/v1/load_lora_adapter"
    with listening(red, blue, lora=tmp_path) as one:
        body = {"lora_name": "poems", "lora_path": "poems"}
        assert one.json(load, body)[1]["error"]["param"] == "model"  # which of the two?
        assert one.json(load, body | {"model": "blue", "lora_path": ".."})[0] == 400
        assert one.json(load, body | {"model": "blue", "lora_name": "red"})[0] == 400
        assert one.json(load, body | {"model": "blue"}) == (
            200,
            {"status": "loaded", "model": "poems"},
        )
        assert one.json(load, body | {"model": "red"})[1]["error"]["param"] == "lora_name"
        cards = {m["id"]: m["parent"] for m in one.json("/v1/models")[1]["data"]}
        assert cards == {"red": None, "blue": None, "poems": "blue"}
        assert one.json("/v1/completions", {"model": "poems", "prompt": "a"})[1]["model"] == "poems"
        assert [r.adapter for r in client_of(one, "blue").requests] == ["poems"]
        assert one.json("/v1/unload_lora_adapter", {"lora_name": "red"})[0] == 400
        assert one.json("/v1/unload_lora_adapter", {"lora_name": "poems"})[0] == 200
        assert one.json("/v1/completions", {"model": "poems", "prompt": "a"})[0] == 404
    with listening(red) as one:
        assert one.json(load, body)[1]["error"]["code"] == "unsupported_parameter"
    with listening(red, lora=tmp_path, access=Access(api_keys=("a",), admin_key="b")) as one:
        assert one.json(load, body, authorization="Bearer a")[0] == 403
        assert one.json(load, body, authorization="Bearer b")[0] == 200


class Leaving(ScriptedClient):
    """Its adapters are gone by the time that a request comes to it, as the engine says."""

    async def submit(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        AdapterTable().acquire(Stream.of(request, 0))
        async for event in super().submit(request):
            yield event


def test_an_adapter_that_is_gone_is_blamed_on_the_model(
    tokenizer: Tokenizer, template: ChatTemplate
) -> None:
    """Which is what a body names it as; the engine calls it an adapter."""
    with pytest.raises(RequestError) as refused:
        AdapterTable().acquire(
            Stream.of(Request(id="1", prompt=[1], params=SamplingParams(), adapter="poems"), 0)
        )
    assert (refused.value.param, refused.value.code) == ("adapter", "model_not_found")
    client = Leaving(tokenizer.encode("a", add_bos=False), adapters=["poems"])
    red = fake_model(tokenizer, "red", client=client, template=template)
    with listening(red) as one:
        for path, body in (
            ("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": HELLO}),
            ("/v1/completions", {"prompt": "a", "stream": True}), ("/v1/embeddings", {"input": "a"}),
            ("/v1/score", {"text_1": "a", "text_2": "b"}),
            ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ):  # fmt: skip
            assert one.ask(path, body)[0] == 200
            error = one.json(path, body | {"model": "poems"})[1]["error"]
            assert (error["param"], error["code"]) == ("model", "model_not_found")
            assert error["message"] == "no adapter 'poems'"


def test_the_first_token_is_awaited_from_the_arrival_on(
    two: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time in which a request is made ready counts too."""

    def slow(*given: Any) -> Any:
        time.sleep(0.3)
        return prepare(*given)

    monkeypatch.setattr(runner, "prepare", slow)
    assert two.json("/v1/completions", {"model": "blue", "prompt": "hi"})[0] == 200
    families = text_string_to_metric_families(two.ask("/metrics")[1])
    samples = {
        (s.name, s.labels.get("gen_ai_request_model")): s.value for f in families for s in f.samples
    }
    (usage,) = [one.usage for one in two.exchanges if one.model == "blue"]
    assert usage is not None and usage.first is not None
    assert usage.began == two.exchanges[0].began
    seconds = samples["gen_ai_server_time_to_first_token_seconds_sum", "blue"]
    assert seconds == usage.first - usage.began >= 0.3


def test_vectors_and_scores(tokenizer: Tokenizer) -> None:
    with listening(fake_model(tokenizer, "dots", task="embed")) as one:
        reply = one.json("/v1/embeddings", {"input": ["a", [1, 2]]})[1]
        lengths = [len(tokenizer.encode("a")), 2]
        expected = [[n / (n * n + 1) ** 0.5, 1 / (n * n + 1) ** 0.5] for n in lengths]
        found = [entry["embedding"] for entry in reply["data"]]
        assert found == [pytest.approx(e, rel=1e-6) for e in expected]
        assert reply["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}
        ranked = one.json("/v1/rerank", {"query": "a", "documents": ["a b c d e", "a"]})[1]
        assert [r["index"] for r in ranked["results"]] == [1, 0]
        assert ranked["results"][0]["relevance_score"] == pytest.approx(1)
        scored = one.json("/v1/score", {"text_1": "a", "text_2": ["a", "b c d"]})[1]["data"]
        assert scored[0]["score"] == pytest.approx(1) and scored[1]["score"] < 1
        status, reply = one.json("/v1/completions", {"prompt": "a"})
        assert (status, reply["error"]["code"]) == (400, "unsupported_task")


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_fails_after_some_text(tokenizer: Tokenizer, stream: bool) -> None:
    for finish, status, param, code in (
        ("refused", 400, "response_format", "constraint_failed"),
        ("error", 500, None, "engine_error"), ("deadline", 408, "timeout", "deadline_exceeded"),
    ):  # fmt: skip
        ended = Ended("", finish, "too costly", param="grammar", code=code)  # type: ignore[arg-type]
        client = ScriptedClient(tokenizer.encode("some text", add_bos=False), ended)
        with listening(fake_model(tokenizer, "red", client=client)) as one:
            got, text = one.ask("/v1/completions", {"prompt": "a", "stream": stream})
        frames = [line.removeprefix("data: ") for line in text.splitlines() if line]
        error = json.loads(frames[-2] if stream else text)["error"]
        assert got == (200 if stream else status)
        assert frames[-1] == "[DONE]" or not stream
        assert (error["param"], error["code"]) == (param, code)
        assert (one.exchanges[0].status, one.exchanges[0].code) == (status, code)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_requests(tokenizer: Tokenizer, stream: bool) -> None:
    client = ScriptedClient(tokenizer.encode("some text", add_bos=False), hang=True)
    with listening(fake_model(tokenizer, "red", client=client)) as one:
        with pytest.raises(httpx.ReadTimeout):
            body = {"prompt": ["a", "b"], "stream": stream}
            httpx.post(f"http://127.0.0.1:{one.port}/v1/completions", json=body, timeout=2)
        until(lambda: one.exchanges and not client.running)
    assert len(client.requests) == 2
    assert [(e.status, e.model) for e in one.exchanges] == [(499, "red")]


def test_draining_refuses_new_work_only(two: Listener) -> None:
    two.models.draining = True
    status, reply = two.json("/v1/chat/completions", {"model": "red", "messages": HELLO})
    assert (status, reply["error"]["code"]) == (503, "shutting_down")
    assert two.json("/v1/embeddings", {"model": "red", "input": "a"})[0] == 503
    assert two.json("/tokenize", {"model": "red", "prompt": "a"})[0] == 200
    assert two.json("/health")[1]["status"] == "draining"


def test_principals_keep_their_caches_apart(tokenizer: Tokenizer) -> None:
    client = ScriptedClient(tokenizer.encode("a", add_bos=False))
    model = fake_model(tokenizer, "red", client=client)
    with listening(model, access=Access(api_keys=("a", "b"))) as one:
        for key, salt in (("a", None), ("b", None), ("a", "x"), ("a", None), ("a", "x")):
            body = {"prompt": "a", "cache_salt": salt}
            assert one.json("/v1/completions", body, authorization=f"Bearer {key}")[0] == 200
        assert one.json("/v1/embeddings", {"input": "a"}, authorization="Bearer a")[0] == 200
        assert one.json("/v1/completions", {"prompt": "a"})[0] == 401
    a, b, ax, again, ax_again, pooled = [r.salt for r in client.requests]
    assert len({a, b, ax, ""}) == 4 and (a, ax, a) == (again, ax_again, pooled)
