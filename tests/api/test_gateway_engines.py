"""A gateway before two real engines: one dies in the middle of texts, which go on at the other."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tests.api.server import Server, serving
from tests.waiting import until

SCHEMA = {
    "type": "object", "properties": {"words": {"type": "array", "items": {"type": "string"}}},
    "required": ["words"],
}  # fmt: skip
CALLS: list[dict[str, Any]] = [
    {"temperature": 1, "seed": 1},
    {"temperature": 0},
    {"temperature": 1, "seed": 2, "frequency_penalty": 0.5, "logprobs": True, "top_logprobs": 2},
    {"temperature": 1, "seed": 3, "response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}},
    {"temperature": 1, "seed": 4, "stop": ["zzzz"], "stream_options": {"include_usage": True}},
    {"temperature": 1, "seed": 5},
    {"temperature": 1, "seed": 6},
    {"temperature": 1, "seed": 7},
]  # fmt: skip


def said(server: Server, fields: dict[str, Any]) -> list[Any]:
    """All that the chunks of a stream say, without what differs between two requests."""
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], "stream": True,
            "max_tokens": 300, "ignore_eos": True} | fields  # fmt: skip
    status, text = server.call("POST", "/v1/chat/completions", json.dumps(body).encode())
    assert status == 200 and text.endswith("data: [DONE]\n\n"), text[-500:]
    chunks = [json.loads(e[6:]) for e in text.split("\n\n")[:-2] if not e.startswith(":")]
    assert len({c["id"] for c in chunks}) == 1
    usage = chunks[-1].get("usage") or {}
    return [[c["choices"] for c in chunks], usage.get("completion_tokens")]


def test_texts_go_on_bit_equal(server: Server, tmp_path: Path) -> None:
    """Sampled, greedy, with penalties and log-probabilities, within a schema: all the same."""
    with serving("smollm2", "--context", "1024", log=tmp_path / "second.log") as second:
        arguments = ("--upstream", server.url, "--upstream", second.url, "--routing", "round-robin")
        log = tmp_path / "gateway.log"
        with serving(*arguments, log=log, does="gateway") as gateway:
            computed = {"prompt": "Only computed.", "max_tokens": 0, "stream": True}
            status, text = gateway.call("POST", "/v1/completions", json.dumps(computed).encode())
            assert status == 200 and text.endswith("data: [DONE]\n\n"), text
            with ThreadPoolExecutor(len(CALLS)) as pool:
                expected = list(pool.map(lambda call: said(server, call), CALLS))
                answers = [pool.submit(said, gateway, call) for call in CALLS]
                name = second.url.partition("://")[2]
                running = partial(gateway.metric, "octavo_upstream_requests_running", replica=name)
                until(lambda: running() >= 2)
                second.stop(signal.SIGKILL)
                assert [a.result() for a in answers] == expected
            until(lambda: gateway.metric("octavo_upstream_failovers_total") >= 2)
    server.wait_idle()
