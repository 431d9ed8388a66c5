"""Traces, the request log and labels, whatever clients send."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from octavo.checkpoint import open_checkpoint
from octavo.errors import UsageError
from octavo.server.request_log import RequestLog
from octavo.server.traces import Trace, Traces, open_traces
from octavo.text import Tokenizer, load_tokenizer
from tests.unit.asgi import scope
from tests.unit.fake_models import Listener, fake_model, listening
from tests.waiting import until

SECRET = "CANARY-secret"
PARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(smollm2))


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traced(tokenizer: Tokenizer, spans: InMemorySpanExporter) -> Iterator[Listener]:
    with listening(
        fake_model(tokenizer, "red", "I am red."), watchers=[Traces(SimpleSpanProcessor(spans))]
    ) as one:
        yield one


def test_traceparent_in_and_out() -> None:
    found = Trace.of(PARENT)
    assert (found.trace, found.parent, found.sampled) == (
        int("ab" * 16, 16),
        int("cd" * 8, 16),
        True,
    )
    assert (
        found.traceparent == f"00-{'ab' * 16}-{found.span:016x}-01" and found.span != found.parent
    )
    assert not Trace.of(PARENT[:-1] + "0").sampled
    bad = [None, "", "00-0-0-01", PARENT[:-3], f"ff{PARENT[2:]}", PARENT.upper(),
           f"00-{'0' * 32}-{'cd' * 8}-01", f"00-{'ab' * 16}-{'0' * 16}-01"]  # fmt: skip
    fresh = [Trace.of(text) for text in bad]
    assert [trace.parent for trace in fresh] == [0] * len(fresh)
    assert len({trace.trace for trace in fresh}) == len(fresh)


def length(span: ReadableSpan) -> int:
    assert span.start_time is not None and span.end_time is not None
    return span.end_time - span.start_time


def test_a_trace_has_a_span_for_each_phase_and_they_add_up(
    traced: Listener, spans: InMemorySpanExporter
) -> None:
    traced.json("/v1/completions", {"prompt": "hi", "max_tokens": 3}, traceparent=PARENT)
    assert traced.ask("/health")[0] == 200
    whole, *parts = spans.get_finished_spans()
    assert whole.context is not None and whole.parent is not None and whole.attributes is not None
    assert f"{whole.context.trace_id:x}" == "ab" * 16 and f"{whole.parent.span_id:x}" == "cd" * 8
    assert [part.name for part in parts] == ["receive", "queue", "prefill", "decode", "send"]
    assert all(part.parent == whole.context for part in parts)
    assert sum(map(length, parts)) == length(whole)
    ends = [part.end_time for part in parts]
    assert [whole.start_time, *ends[:-1]] == [part.start_time for part in parts] and ends[
        -1
    ] == whole.end_time
    assert whole.name == "text_completion red"
    assert whole.attributes["gen_ai.request.model"] == "red"
    assert whole.attributes["http.route"] == "/v1/completions"


def test_an_answer_names_its_span(traced: Listener, spans: InMemorySpanExporter) -> None:
    asked = http.client.HTTPConnection("127.0.0.1", traced.port, timeout=20)
    body = json.dumps({"prompt": "hi", "max_tokens": 3})
    asked.request("POST", "/v1/completions", body, {"traceparent": PARENT})
    answer = asked.getresponse()
    answer.read()
    asked.close()
    until(spans.get_finished_spans)
    sent = spans.get_finished_spans()
    assert sent[0].context is not None
    assert answer.getheader("traceparent") == f"00-{'ab' * 16}-{sent[0].context.span_id:016x}-01"


def test_what_is_not_sampled_is_not_sent(traced: Listener, spans: InMemorySpanExporter) -> None:
    traced.json("/v1/completions", {"prompt": "hi"}, traceparent=PARENT[:-1] + "0")
    assert spans.get_finished_spans() == ()
    traced.ask(f"/{SECRET}")
    (span,) = spans.get_finished_spans()
    assert span.name == "GET other" and SECRET not in span.to_json()


def test_addresses_of_collectors() -> None:
    with pytest.raises(UsageError, match="is no address"):
        open_traces("localhost:4318")


def logged(tokenizer: Tokenizer, path: Path, full: bool) -> list[dict[str, Any]]:
    """Lines of two requests, one refused, and one for health, which has none."""
    log = RequestLog(path, full)
    with listening(fake_model(tokenizer, "red", "I am red."), watchers=[log]) as one:
        one.json("/v1/completions", {"prompt": SECRET}, authorization=f"Bearer {SECRET}")
        one.json("/v1/completions", {"prompt": SECRET, "n": 0})
        one.ask("/health")
    log.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_request_log_has_no_contents(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('{"before": true}\n')
    _, first, second = logged(tokenizer, path, full=False)
    assert (first["status"], second["status"], second["code"]) == (200, 400, "invalid_value")
    assert first["completion_tokens"] > 0 and first["finish_reasons"] == ["length"]
    assert sum(first["phases"].values()) == pytest.approx(first["seconds"], abs=1e-5)
    assert SECRET not in path.read_text()


def test_contents_are_logged_where_that_is_asked_for(tokenizer: Tokenizer, tmp_path: Path) -> None:
    first, second = logged(tokenizer, tmp_path / "log", full=True)
    assert json.loads(first["request"])["prompt"] == SECRET
    assert json.loads(first["response"])["choices"][0]["text"].strip() == "I am red."
    assert "error" in json.loads(second["response"])
    assert f"Bearer {SECRET}" not in (tmp_path / "log").read_text()
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--log-requests"):
        RequestLog(tmp_path / "nothing" / "log")


def test_what_clients_send_makes_no_series(tokenizer: Tokenizer) -> None:
    """10,000 names of models, paths, ids, methods and traces; each kind is there once before."""

    def hostile(i: int) -> tuple[str, dict[str, Any]]:
        odd = f"x{i}\u2603\n{'y' * (i % 50)}"
        kinds = [
            (f"/v1/{i}/{odd}", {}), ("/v1/completions", {"model": odd, "prompt": "a"}),
            (f"/v1/models/{odd}", {}), ("/v1/completions", {"model": "red", odd: 1, "n": odd}),
        ]  # fmt: skip
        return kinds[i % len(kinds)]

    async def ask(one: Listener, i: int) -> None:
        path, body = hostile(i)
        asked = scope("http", path, x_request_id=f"id{i}", traceparent=PARENT, user_agent=f"u{i}")
        asked["method"] = ("POST", "GET", f"M{i}")[i % 3]
        asked["headers"] += [(b"content-type", b"application/json")]
        messages = iter([{"type": "http.request", "body": json.dumps(body).encode()}])

        async def receive() -> Any:
            return next(messages, {"type": "http.disconnect"})

        async def send(message: Any) -> None:
            pass

        await one.app(asked, receive, send)

    async def many(one: Listener, numbers: range) -> None:
        for i in numbers:
            await ask(one, i)

    def series(one: Listener) -> set[tuple[Any, ...]]:
        families = text_string_to_metric_families(one.metrics.render().decode())
        return {(s.name, *s.labels.items()) for f in families for s in f.samples}

    with listening(fake_model(tokenizer, "red", "I am red.")) as one:
        asyncio.run(many(one, range(60)))
        before = series(one)
        asyncio.run(many(one, range(60, 10_000)))
        assert series(one) == before
        assert len(one.exchanges) == 10_000
        assert len(one.timelines.recent) <= 256
