"""What a server tells about itself: a line for each request, and numbers."""

from __future__ import annotations

import gzip
import json
import logging
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.parser import text_string_to_metric_families

from octavo.generate.reply import Usage
from octavo.server.exchange import Exchange
from octavo.server.logs import log_exchange, logging_to
from tests.api.server import Server, serving
from tests.waiting import until

SECRET = "CANARY-secret"
MODEL = ("model_name", "smollm2")
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "50"}  # ms until spans are sent


class Collector(BaseHTTPRequestHandler):
    """Takes traces, as OpenTelemetry's collector does."""

    spans: queue.Queue[Span] = queue.Queue()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        packed = self.headers.get("content-encoding") == "gzip"
        sent = ExportTraceServiceRequest.FromString(gzip.decompress(body) if packed else body)
        for span in (s for r in sent.resource_spans for o in r.scope_spans for s in o.spans):
            self.spans.put(span)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def collector() -> Iterator[str]:
    """Its address."""
    listening = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listening.server_port}"
    listening.shutdown()
    listening.server_close()


@pytest.fixture(scope="module")
def told(
    smollm2: Path, collector: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("told")
    watched = "--otlp", collector, "--log-requests", str(folder / "requests")
    with serving(
        "smollm2", "--offline", "--log-format", "json", *watched, log=folder / "log", env=SOON
    ) as s:
        yield s


def lines(server: Server, count: int) -> list[dict[str, Any]]:
    """The last lines of the log, once there are so many that are JSON."""

    def found() -> list[dict[str, Any]]:
        return [json.loads(t) for t in server.log.read_text().splitlines() if t.startswith("{")]

    until(lambda: len(found()) >= count)
    return found()


def samples(server: Server) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(server.get("/metrics")[1])
    return {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}


def chat(**changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": SECRET}]
    return {"messages": messages, "max_tokens": 4, "temperature": 0, "ignore_eos": True} | changes


def says(text: str) -> dict[str, Any]:
    """A request whose reply is a text."""
    return {"prompt": "a", "structured_outputs": {"choice": [text]}, "max_tokens": 20}


def test_every_answer_leaves_one_line(told: Server) -> None:
    before = len(lines(told, 0))
    header = {"x-secret": SECRET, "authorization": f"Bearer {SECRET}"}
    asked = [
        ("/v1/chat/completions", chat(), 200, None),
        ("/v1/chat/completions", chat(stream=True, max_tokens=3), 200, None),
        ("/v1/chat/completions", chat(n=0), 400, "invalid_value"),
        ("/v1/chat/completions", chat(max_tokens=10**6), 400, "context_length_exceeded"),
        ("/chat/completions", chat(model=SECRET), 404, "model_not_found"),
        ("/v1/embeddings", {"input": SECRET}, 200, None),
        ("/score", {"text_1": SECRET, "text_2": "a"}, 200, None),
        ("/tokenize", {"prompt": SECRET}, 200, None),
        (f"/{SECRET}", {}, 404, None),
        ("/v1/models", {}, 405, None),
        ("/v1/completions", says(SECRET), 200, None),
    ]
    for path, body, status, _ in asked:
        made, text = told.call("POST", path, json.dumps(body).encode(), header)
        assert made == status
    assert json.loads(text)["choices"][0]["text"] == SECRET
    for path in ("/health", "/health/live", "/metrics"):  # said at level debug only
        assert told.get(path)[0] == 200
    with socket.create_connection(("127.0.0.1", told.port)) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200)
        assert sock.recv(100).startswith(b"HTTP/1.1 431")
    with socket.create_connection(("127.0.0.1", told.port)) as sock:
        body = json.dumps(chat(max_tokens=2000)).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        time.sleep(0.3)
    told.wait_idle()
    new = lines(told, before + len(asked) + 2)[before:]
    assert len(new) == len(asked) + 2
    canonical = {
        "/chat/completions": "/v1/chat/completions",
        "/score": "/v1/score",
        f"/{SECRET}": "other",
    }
    expected = [(canonical.get(p, p), s, c) for p, _, s, c in asked]
    expected += [("other", 431, "headers_too_large"), ("/v1/chat/completions", 499, None)]
    assert [(e["route"], e["status"], e["code"]) for e in new] == expected
    assert all(
        e["seconds"] >= 0 and e["level"] == "info" and e["logger"] == "octavo.server" for e in new
    )
    assert all(e["received_bytes"] > 0 for e in new[:6])
    assert (new[0]["completion_tokens"], new[0]["finish_reasons"]) == (4, ["length"])
    assert [e["model"] for e in new[:5]] == 4 * ["smollm2"] + [None]
    assert new[0]["ttft_seconds"] >= new[0]["queue_seconds"] > 0
    assert new[1]["completion_tokens"] == 3 and new[1]["sent_bytes"] > 100
    assert SECRET not in told.log.read_text()


def test_metrics_have_one_route_an_endpoint(told: Server) -> None:
    for path in ("/v1/rerank", "/rerank"):
        assert told.post(path, {"query": "a", "documents": ["b"]})[0] == 200
        assert told.post(path, {})[0] == 400
    for i in range(20):
        assert told.get(f"/nothing/{i}")[0] == 404
        assert told.get(f"/v1/models/nothing{i}")[0] == 404
    found = samples(told)
    routes = {dict(labels)["route"] for name, labels in found if name == "octavo_requests_total"}
    assert "/v1/rerank" in routes and "other" in routes and "/v1/models/{name:path}" in routes
    assert not [r for r in routes if "nothing" in r or r == "/rerank"]
    count = found["octavo_requests_total", frozenset({("route", "/v1/rerank"), ("status", "200")})]
    assert count == 2


def test_histograms_count_requests(told: Server) -> None:
    own = {"octavo_request_queue_time_seconds", "octavo_request_prompt_tokens", "octavo_request_generation_tokens"}  # fmt: skip
    shared = {f"gen_ai_server_{n}_seconds" for n in ("time_to_first_token", "request_duration")}
    chats = frozenset({("gen_ai_request_model", "smollm2"), ("gen_ai_operation_name", "chat")})

    def values() -> dict[str, float]:
        found = samples(told)
        out = {
            n + end: found.get((n + end, chats if n in shared else frozenset({MODEL})), 0.0)
            for n in own | shared
            for end in ("_count", "_sum")
        }
        for reason in ("length", "stop"):
            key = "octavo_request_finished_total", frozenset({MODEL, ("finished_reason", reason)})
            out[reason] = found.get(key, 0.0)
        return out

    before = values()
    status, reply = told.post("/v1/chat/completions", chat(max_tokens=5, n=2))
    assert status == 200
    after = values()
    gained = {name: after[name] - before[name] for name in after}
    assert all(gained[n + "_count"] == 1 for n in own | shared)
    assert gained["octavo_request_generation_tokens_sum"] == 10
    assert gained["octavo_request_prompt_tokens_sum"] == reply["usage"]["prompt_tokens"]
    assert gained["length"] == 2 and gained["stop"] == 0
    latency, first = (
        gained[f"gen_ai_server_{n}_seconds_sum"]
        for n in ("request_duration", "time_to_first_token")
    )
    assert latency >= first >= gained["octavo_request_queue_time_seconds_sum"] > 0


def test_build_and_processes(told: Server) -> None:
    rule = {"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}}
    assert told.post("/v1/chat/completions", chat() | rule)[0] == 200
    found = samples(told)
    (build,) = [dict(labels) for name, labels in found if name == "octavo_build_info"]
    assert build["version"] == json.loads(told.get("/version")[1])["version"]
    assert re.fullmatch(r"3\.\d+\.\d+", build["python"])
    for name, labels in (("process", frozenset()), ("octavo_engine_process", frozenset({MODEL}))):
        assert found[f"{name}_resident_memory_bytes", labels] > 1 << 20
        assert found[f"{name}_open_fds", labels] > 3
    for worker in ("templates", "grammars"):
        labels = frozenset({("worker", worker)})
        assert found["octavo_worker_process_resident_memory_bytes", labels] > 1 << 20
        assert found["octavo_worker_process_cpu_seconds_total", labels] > 0
    engine = found["octavo_engine_process_resident_memory_bytes", frozenset({MODEL})]
    assert engine > 50 << 20
    assert [name for name, _ in found if name == "python_info"]


def test_a_request_is_the_same_in_its_time_line_its_trace_and_the_log(told: Server) -> None:
    words = " ".join(str(i) for i in range(300))
    body = {"prompt": words, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    own = {"x-request-id": "watched-1", "traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    assert told.call("POST", "/v1/completions", json.dumps(body).encode(), own)[0] == 200
    line = json.loads(told.get("/v1/requests/watched-1")[1])
    assert (
        sum(tokens for _, tokens in line["parts"]) == line["prompt_tokens"] - line["cached_tokens"]
    )
    assert [at for at, _ in line["parts"]] == sorted(at for at, _ in line["parts"])
    assert len(line["tokens"]) == line["completion_tokens"] == 6 and line["preempted"] == []
    assert list(line["phases"]) == ["receive", "queue", "prefill", "decode", "send"]
    assert sum(line["phases"].values()) == pytest.approx(line["seconds"], abs=1e-5)
    spans: dict[str, Span] = {}
    while len(spans) < 6:
        span = Collector.spans.get(timeout=20)
        if span.trace_id.hex() == "ab" * 16:
            spans[span.name] = span
    whole = spans.pop("text_completion smollm2")
    assert whole.parent_span_id.hex() == "cd" * 8 and set(spans) == set(line["phases"])
    assert all(span.parent_span_id == whole.span_id for span in spans.values())
    lengths = {n: s.end_time_unix_nano - s.start_time_unix_nano for n, s in spans.items()}
    assert sum(lengths.values()) == whole.end_time_unix_nano - whole.start_time_unix_nano
    assert {n: pytest.approx(ns / 1e9, abs=2e-6) for n, ns in lengths.items()} == line["phases"]
    assert [e.name for e in spans["prefill"].events] == ["part"] * len(line["parts"])
    text = (told.log.parent / "requests").read_text()
    (logged,) = [e for e in map(json.loads, text.splitlines()) if e["id"] == "watched-1"]
    assert logged["phases"] == line["phases"] and words not in text
    listed = json.loads(told.get("/v1/requests")[1])
    assert listed["recent"][0] == line and listed["running"] == []
    assert told.get("/v1/requests/nobody")[0] == 404


def test_a_trace_goes_through_a_gateway(told: Server, collector: str, tmp_path: Path) -> None:
    """The server's span is within the gateway's, which is within the client's."""
    requests = tmp_path / "requests"
    watched = "--upstream", told.url, "--otlp", collector, "--log-requests", str(requests)
    with serving(*watched, log=tmp_path / "log", env=SOON, does="gateway") as gateway:
        own = {"x-request-id": "through", "traceparent": f"00-{'12' * 16}-{'34' * 8}-01"}
        body = json.dumps({"prompt": SECRET, "max_tokens": 4}).encode()
        assert gateway.call("POST", "/v1/completions", body, own)[0] == 200
        whole: dict[str, Span] = {}  # by those that they are in
        while len(whole) < 2:
            span = Collector.spans.get(timeout=60)
            if span.trace_id.hex() == "12" * 16 and span.name == "text_completion smollm2":
                whole[span.parent_span_id.hex()] = span
    outer = whole.pop("34" * 8)
    (inner,) = whole.values()
    assert inner.parent_span_id == outer.span_id
    assert outer.start_time_unix_nano < inner.start_time_unix_nano
    (line,) = map(json.loads, requests.read_text().splitlines())
    assert (line["id"], line["status"], line["completion_tokens"]) == ("through", 200, 4)
    assert SECRET not in requests.read_text()


def octavo(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "octavo.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_top_and_doctor_look_at_a_server(told: Server) -> None:
    seen = octavo("top", "--server", told.url, "--once")
    assert seen.returncode == 0, seen.stderr
    rows = seen.stdout.splitlines()
    assert (
        rows[0].split()[:3] == ["model", "running", "waiting"] and rows[1].split()[0] == "smollm2"
    )
    said = octavo("doctor", "--server", told.url, "--json")
    found = json.loads(said.stdout)
    assert found["server"] == told.url and said.returncode == bool(found["findings"])
    named = {each["name"] for each in found["findings"]}
    assert "OctavoCutAnswers" in named  # every answer of this file is
    assert all(each["mitigation"] for each in found["findings"])
    nobody = octavo("doctor", "--server", "127.0.0.1:1")
    assert nobody.returncode == 2 and "does not answer" in nobody.stderr


def test_text_lines() -> None:
    out = StringIO()
    with logging_to(out, "info", "text"):
        one = Exchange("/v1/chat/completions", "POST", 404, "model_not_found", 12, 34, ended=0)
        one.ended = one.began + 0.0251
        log_exchange(one)
        one.route = "/health"
        log_exchange(one)
        one.route, one.status, one.code = "/v1/models", 500, "engine_failed"
        log_exchange(one)
        one.route, one.status = "/v1/completions", 200
        for last in (1.5, 2.0):  # both tokens at once, and one after the other
            one.usage = Usage(3, completion=2, began=1.0, first=1.5, last=last)
            log_exchange(one)
        logging.getLogger("octavo.engine").warning("the engine is started again")
    text = re.sub(r"\d\d:\d\d:\d\d", "T", out.getvalue())
    assert text == (
        "T  chat  POST 12 bytes  25 ms  404 model_not_found\n"
        "T  error  models  POST 12 bytes  25 ms  500 engine_failed\n"
        "T  completions  3 → 2 tokens  ttft 500 ms  cache 0/3  200\n"
        "T  completions  3 → 2 tokens  ttft 500 ms  2 tok/s  cache 0/3  200\n"
        "T  warning  the engine is started again\n"
    )


def test_levels_leave_lines_out() -> None:
    out = StringIO()
    with logging_to(out, "error", "json"):
        log_exchange(Exchange("/v1/models", "GET", 200))
        log_exchange(Exchange("/v1/models", "GET", 503, "loading"))
        log_exchange(Exchange("/v1/models", "GET", 500))
    (line,) = out.getvalue().splitlines()
    assert json.loads(line)["status"] == 500


def test_a_reader_that_has_stopped_does_not_stop_the_server() -> None:
    class Stuck(StringIO):
        def write(self, text: str) -> int:
            go_on.wait(20)
            return super().write(text)

    go_on, out = threading.Event(), Stuck()
    with logging_to(out):
        began = time.monotonic()
        for _ in range(15_000):
            log_exchange(Exchange("/v1/models", "GET", 200))
        seconds = time.monotonic() - began
        go_on.set()
    assert seconds < 10
    assert 10_000 <= out.getvalue().count("\n") <= 10_002
