"""Thousands of hostile requests beside a canary: each gets its right answer, and nobody else notices.

Stalls are counted in CPU time: how long the front worked on others while a health check waited. What
other programs do to the clock does not count, what holds the event loop does.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.api.hostile import ENDPOINTS, FIELDS, Case, cases
from tests.api.server import Server, serving

CASES = cases()
AT_ONCE = 4
STALL = 0.25  # seconds
GROWTH = 16 << 20  # bytes, as in the test of 1,000 disconnects
CANARY = {
    "prompt": "Once upon a time",
    "max_tokens": 200,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}


def cpu(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """Repeats `work` in a thread until the block ends, then once more. What it raises is raised."""
    stop, failures = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            while not stop.is_set():
                work()
            work()
        except BaseException as e:
            failures.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(120)
    for failure in failures:
        raise failure


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose KV cache is small: once it is full, memory has nothing more to grow by."""
    folder = tmp_path_factory.mktemp("server")
    sizes = ("--context", "2048", "--memory", "400MiB", "--lora-memory", "16MiB")
    options = (*sizes, "--lora-dir", str(folder))
    with serving("smollm2", "--offline", *options, log=folder / "log") as s:
        yield s


@dataclass
class Health:
    """Probes the server and keeps the longest stall. waits: the longest by the clock."""

    server: Server
    stall: float = 0
    waits: float = 0
    count: int = 0

    def probe(self) -> None:
        front = psutil.Process(self.server.process.pid)
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        for _ in range(20):
            began, used = time.perf_counter(), cpu(front)
            connection.request("GET", "/health/live")
            assert connection.getresponse().read() == b'{"status":"live"}'
            waited = time.perf_counter() - began
            self.stall = max(self.stall, min(waited, cpu(front) - used))
            self.waits = max(self.waits, waited)
            self.count += 1
            time.sleep(0.005)
        connection.close()


@dataclass
class Sweep:
    """What came of all cases."""

    answers: dict[str, tuple[int, str]] = field(default_factory=dict)
    canaries: list[str] = field(default_factory=list)
    expected: str = ""
    health: Health | None = None
    memory: list[tuple[int, int]] = field(default_factory=list)  # of the front and the engine
    engines: set[int] = field(default_factory=set)
    restarts: float = 0


def canary(server: Server) -> str:
    status, raw = server.call("POST", "/v1/completions", json.dumps(CANARY).encode())
    assert status == 200
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    assert raw.rstrip().endswith("data: [DONE]")
    return "".join(e["choices"][0]["text"] for e in events)


async def send(server: Server, some: list[Case], answers: dict[str, tuple[int, str]]) -> None:
    gate = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(timeout=120) as client:

        async def one(case: Case) -> None:
            async with gate:
                reply = await client.post(server.url + case.route, content=case.data)
                answers[case.id] = reply.status_code, reply.text

        await asyncio.gather(*(one(case) for case in some))


@pytest.fixture(scope="module")
def sweep(server: Server) -> Sweep:
    out = Sweep(expected=canary(server), health=Health(server))
    front, engine = psutil.Process(server.process.pid), server.engine()
    assert out.health
    for part in (CASES, *3 * [CASES[::3]]):  # what all have warmed up is the baseline of the others
        with beside(lambda: out.canaries.append(canary(server))), beside(out.health.probe):
            asyncio.run(send(server, part, out.answers))
        server.wait_idle()
        out.memory.append((front.memory_info().rss, engine.memory_info().rss))
        out.engines.add(server.engine().pid)
    out.engines.add(engine.pid)
    out.restarts = server.metric("octavo_engine_restarts_total")
    return out


def test_there_are_enough() -> None:
    fields = {(c.route, c.name.rpartition("-")[0]) for c in CASES}
    assert len(CASES) > 3000 and len(fields) > 200
    assert sum(c.wrong is not None for c in CASES) > 1000


def root(param: str | None) -> str:
    return (param or "").split(".")[0].split("[")[0]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_answer(sweep: Sweep, case: Case) -> None:
    """A reply, or a refusal that names a field of the body and, for a wrong type, the right one."""
    status, text = sweep.answers[case.id]
    if status == 200:
        assert case.wrong is None
        assert text.endswith("data: [DONE]\n\n") if text.startswith("data: ") else json.loads(text)
        return
    error = json.loads(text)["error"]
    assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) < 1000
    late = "timeout" in case.name and error["code"] == "deadline_exceeded"
    unknown = (
        ".model" not in case.name and "model" in case.name and error["code"] == "model_not_found"
    )
    ahead = "others' work" in error["message"]  # known before it began: the others' in the crowd
    assert status == ((503 if ahead else 408) if late else 404 if unknown else 400)
    if case.wrong is not None:
        assert root(error["param"]) == case.wrong
    known = {*ENDPOINTS[case.route][0].__struct_fields__, *FIELDS.names, "no_such_field"}
    broken = error["message"].startswith("the body ")
    assert (error["param"] is None) if broken else (root(error["param"]) in known)


def test_the_canary_noticed_nothing(sweep: Sweep) -> None:
    assert len(sweep.canaries) >= 4 and set(sweep.canaries) == {sweep.expected}


def test_no_engine_died(sweep: Sweep) -> None:
    assert len(sweep.engines) == 1 and sweep.restarts == 0


def test_health_never_stalled(sweep: Sweep) -> None:
    assert sweep.health and sweep.health.count > 100
    print(
        f"{sweep.health.count} probes; longest {sweep.health.waits:.3f} s, of it {sweep.health.stall:.3f} s the front's"
    )
    assert sweep.health.stall <= STALL


def test_memory_is_back(sweep: Sweep) -> None:
    """What is lost is lost each time; what an allocator keeps for a while comes back."""
    print([[m >> 20 for m in both] for both in sweep.memory])
    baseline, *later = map(sum, sweep.memory)
    assert min(later) - baseline <= GROWTH


# -- bodies of megabytes ---------------------------------------------------------------------------

MANY = 2_000_000
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BIG: dict[str, tuple[str, str, bytes]] = {
    "ids-n-128": (COMPLETIONS, "prompt", b'{"n":128,"prompt":[' + b"11," * MANY + b"1]}"),
    "lists": (COMPLETIONS, "prompt", b'{"prompt":[' + b"[1]," * MANY + b"[1]]}"),
    "texts": (COMPLETIONS, "prompt", b'{"prompt":[' + b'"a",' * MANY + b'"a"]}'),
    "text-and-lists": (COMPLETIONS, "prompt", b'{"prompt":["a"' + b",[1]" * (MANY - 9) + b"]}"),
    "ids-and-lists": (COMPLETIONS, "prompt", b'{"prompt":[1' + b",[1]" * (MANY - 9) + b"]}"),
    "allowed": (COMPLETIONS, "allowed_token_ids", b'{"prompt":"a","allowed_token_ids":[' + b"11," * MANY + b"1]}"),
    "stops": (COMPLETIONS, "stop", b'{"prompt":"a","stop":[' + b'"a",' * MANY + b'"a"]}'),
    "stop-ids": (COMPLETIONS, "stop_token_ids", b'{"prompt":"a","stop_token_ids":[' + b"11," * MANY + b"1]}"),
    "biases": (COMPLETIONS, "logit_bias", b'{"prompt":"a","logit_bias":{' + b",".join(b'"%d":1' % i for i in range(600_000)) + b"}}"),
    "names": (COMPLETIONS, "0", b"{" + b",".join(b'"%d":1' % i for i in range(600_000)) + b"}"),
    "schema": (COMPLETIONS, "response_format", b'{"prompt":"a","response_format":{"type":"json_object","schema":{"a":[' + b"[]," * MANY + b"[]]}}}"),
    "choices": (COMPLETIONS, "structured_outputs", b'{"prompt":"a","structured_outputs":{"choice":[' + b'"a",' * MANY + b'"a"]}}'),
    "pattern": (COMPLETIONS, "structured_outputs", b'{"prompt":"a","structured_outputs":{"regex":"' + b"[" * 3 * MANY + b'"}}'),
    "messages": (CHAT, "messages", b'{"messages":[' + b'{"role":"user"},' * 500_000 + b'{"role":"user"}]}'),
    "parts": (CHAT, "messages", b'{"messages":[{"role":"user","content":[' + b'{"type":""},' * 600_000 + b'{"type":""}]}]}'),
    "part": (CHAT, "messages", b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":[' + b"[]," * MANY + b"[]]}]}]}"),
    "arguments": (CHAT, "messages", b'{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{\\"a\\":[' + b"[]," * MANY + b'[]]}"}}]}]}'),
    "tools": (CHAT, "tools", b'{"messages":[],"tools":[' + b'{"function":{"name":""}},' * 300_000 + b"{}]}"),
    "options": (CHAT, "chat_template_kwargs", b'{"messages":[],"chat_template_kwargs":{"a":[' + b"[]," * MANY + b"[]]}}"),
    "inputs": ("/v1/embeddings", "input", b'{"input":[' + b"[1]," * MANY + b"[1]]}"),
    "documents": ("/v1/rerank", "documents", b'{"query":"a","documents":[' + b'{"text":"a"},' * 600_000 + b'"a"]}'),
    "pairs": ("/v1/score", "text_1", b'{"text_2":"a","text_1":[' + b'"a",' * MANY + b'"a"]}'),
    "tokens": ("/detokenize", "tokens", b'{"tokens":[' + b"11," * MANY + b"1]}"),
}  # fmt: skip


@pytest.mark.parametrize("name", BIG)
def test_sizes_before_contents(server: Server, name: str) -> None:
    """What is refused for its size costs less than a stall, all in all."""
    route, param, data = BIG[name]
    assert 4 << 20 < len(data) <= 8 << 20
    front = psutil.Process(server.process.pid)
    before = cpu(front)
    status, reply = server.post(route, data)
    used = cpu(front) - before
    assert (status, root(reply["error"]["param"])) == (400, param)
    assert used <= STALL


LONG: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "a b, <" * 700_000}]}),
    (COMPLETIONS, {"prompt": "hello, world " * 320_000}),
    ("/tokenize", {"content": "hello, world " * 320_000}),
    ("/v1/embeddings", {"input": "hello, world " * 320_000}),
    ("/v1/score", {"text_1": "a", "text_2": ["hello, world " * 3200] * 100}),
]


@pytest.mark.parametrize(("route", "body"), LONG, ids=[r.rpartition("/")[2] for r, _ in LONG])
def test_long_texts_hold_up_nobody(server: Server, route: str, body: dict[str, Any]) -> None:
    """A text that takes seconds to tokenize leaves the event loop to others."""
    health = Health(server)
    began = time.perf_counter()
    with beside(health.probe):
        status, _ = server.post(route, body)
    took = time.perf_counter() - began
    print(f"{took:.2f} s; a health check waited {health.waits:.3f} s at most")
    assert status == (200 if route == "/tokenize" else 400)
    assert health.waits < max(STALL, took / 4)


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a b, <" * 1_000_000}]}, "messages"),
        (COMPLETIONS, {"prompt": ["a", "hello, world " * 500_000]}, "prompt"),
        ("/v1/embeddings", {"input": "hello, world " * 500_000}, "input"),
        ("/v1/score", {"text_1": "hello, world " * 500_000, "text_2": "a"}, "text_1"),
    ],
)
def test_what_cannot_fit_is_not_tokenized(
    server: Server, route: str, body: dict[str, Any], param: str
) -> None:
    before = sum(psutil.Process(server.process.pid).cpu_times()[:2])
    status, reply = server.post(route, body)
    used = sum(psutil.Process(server.process.pid).cpu_times()[:2]) - before
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    assert root(reply["error"]["param"]) == param
    assert used <= 0.5  # tokenizing takes four seconds and more


def test_equal_masks_in_128_choices(server: Server) -> None:
    """A list of the whole vocabulary, 128 times: sent in turns, and read at once."""
    body = {
        "prompt": "a",
        "n": 128,
        "max_tokens": 1,
        "allowed_token_ids": list(range(49_000)),
        "seed": 1,
    }
    health = Health(server)
    with beside(health.probe):
        status, reply = server.post(COMPLETIONS, body)
    assert status == 200 and len(reply["choices"]) == 128
    assert health.stall <= STALL


def test_long_names_of_adapters(smollm2: Path, tmp_path: Path) -> None:
    """With a folder to load from, names reach the file system."""
    (tmp_path / "adapters").mkdir()
    with serving(
        "smollm2", "--offline", "--lora-dir", str(tmp_path / "adapters"), log=tmp_path / "log"
    ) as s:
        for path in ("a" * 256, "a/" * 5000, "a\0b", "..", "/etc", "\U0001f642" * 100):
            status, reply = s.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": path})
            assert (status, reply["error"]["param"]) == (400, "lora_path")
