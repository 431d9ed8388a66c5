"""All pairs of features: each must keep its promise in the company of every other, or be refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any

import pytest
import torch

from tests.api.server import Server, serving
from tests.api.test_forced import streamed
from tests.parity.test_lora import make_adapter

MODULES = {"self_attn.q_proj": (576, 576), "mlp.down_proj": (1536, 576)}
FEATURES = (
    "stream",
    "n",
    "logprobs",
    "grammar",
    "tools",
    "beams",
    "stop",
    "LoRA",
    "prefix",
    "preemption",
)
REFUSED = {("grammar", "tools"): "tools", ("beams", "stop"): "stop"}
PATTERN = "[A-Z][a-z]{2,9} (is|was) [a-z ]{3,20}[.]"
CUT_PATTERN = "[A-Z][b-z]{0,9}|[A-Z][b-z]{2,9} (is|w|is [b-z ]*)"
STOPS = ("a", "e ")
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"what": {"type": "string", "maxLength": 12}},
                                                "required": ["what"], "additionalProperties": False}},
}  # fmt: skip
Choice = dict[str, Any]  # content, calls, finish, logprobs


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose cache holds about 1,500 tokens, with an adapter."""
    folder = make_adapter(
        tmp_path_factory.mktemp("pairs") / "a",
        3,
        rank=8,
        layers=30,
        modules=MODULES,
        dtype=torch.bfloat16,
    )
    options = ("--memory", "290MiB", "--lora-memory", "16MiB", "--context", "640")
    log = tmp_path_factory.mktemp("small") / "log"
    with serving(
        "smollm2", "--offline", *options, "--lora", f"adapter={folder}", log=log
    ) as server:
        yield server


def request(features: set[str], story: str = "a cat", seed: int = 5) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": "adapter" if "LoRA" in features else "smollm2", "max_tokens": 40, "seed": seed,
        "messages": [{"role": "user", "content": f"Tell me about {story}. " * 12}],
    }  # fmt: skip
    if "beams" in features:
        body |= {"use_beam_search": True, "beam_width": 3}
    else:
        body["temperature"] = 0.8
    if "n" in features:
        body["n"] = 2
    if "logprobs" in features:
        body |= {"logprobs": True, "top_logprobs": 2}
    if "grammar" in features:
        body["structured_outputs"] = {"regex": PATTERN}
    if "tools" in features:
        body |= {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    if "stop" in features:
        body["stop"] = list(STOPS)
    return body


def ask(server: Server, body: dict[str, Any]) -> list[Choice]:
    status, reply = server.post("/v1/chat/completions", body)
    assert status == 200, reply
    out = []
    for c in reply["choices"]:
        calls = [
            [k["function"]["name"], k["function"]["arguments"]]
            for k in c["message"].get("tool_calls", [])
        ]
        logprobs = c["logprobs"]["content"] if c["logprobs"] else []
        content = c["message"]["content"] or ""
        out.append(
            {"content": content, "calls": calls, "finish": c["finish_reason"], "logprobs": logprobs}
        )
    return out


def said(choices: list[Choice]) -> list[tuple[Any, ...]]:
    return [(c["content"], c["calls"], c["finish"]) for c in choices]


def check(server: Server, feature: str, others: set[str]) -> None:
    """What `feature` promises, relative to the same request without it."""
    both = others | {feature}
    body = request(both)
    got = ask(server, body)
    base = ask(server, request(others))
    match feature:
        case "stream":
            pieces = streamed(server, body)
            flat = [{**p, "calls": [p["calls"][i] for i in sorted(p["calls"])]} for p in pieces]
            assert said(flat) == said(got) == said(base)
            assert [p["logprobs"] for p in flat] == [c["logprobs"] for c in got]
        case "n":
            assert len(got) == 2 and said(got)[:1] == said(base)
            if "beams" not in both:
                assert said(got)[1:] == said(ask(server, request(others, seed=6)))
        case "logprobs":
            assert said(got) == said(base) and all(c["logprobs"] for c in got)
            assert all(
                t["logprob"] <= 0 and len(t["top_logprobs"]) == 2
                for c in got
                for t in c["logprobs"]
            )
        case "grammar":
            free = request(both)
            del free["structured_outputs"]
            assert said(ask(server, free)) == said(base) != said(got)
            for c in got:
                assert c["finish"] == "stop" and c["content"]
                assert re.fullmatch(CUT_PATTERN if "stop" in both else PATTERN, c["content"])
        case "tools":
            assert not any(c["calls"] for c in base)
            for c in got:
                if "stop" in both:  # the text of a call is cut like any other
                    assert (c["calls"], c["finish"]) == ([], "stop")
                    assert '<tool_call>\n{"name": "look"'.startswith(c["content"])
                else:
                    ((name, arguments),) = c["calls"]
                    assert (name, c["finish"]) == ("look", "tool_calls")
                    assert set(json.loads(arguments)) == {"what"}
        case "beams":
            best = request(both | {"logprobs"}) | {"n": 3, "beam_width": 3}
            scores = [mean(c) for c in ask(server, best)]
            assert scores == sorted(scores, reverse=True) and len(set(scores)) == 3
            assert said(got) == said(ask(server, best))[: len(got)]
        case "stop":
            for cut, full in zip(got, base, strict=True):
                text = full["content"]
                for name, _ in full["calls"]:
                    text += f'<tool_call>\n{{"name": "{name}", "arguments": '
                at = min(text.find(s) for s in STOPS if s in text)
                assert (cut["content"], cut["finish"]) == (text[:at], "stop")
        case "LoRA":
            assert scored(server, both) != scored(server, others)
            crowd = [request(others), body, request(others), body]
            assert [said(x) for x in together(server, crowd)] == [said(base), said(got)] * 2
        case "prefix":
            status, reply = server.post("/v1/chat/completions", body)
            assert status == 200 and reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 50
            assert said(ask(server, body)) == said(got)
        case "preemption":
            many = [request(both, f"number {i}") for i in range(14)]
            alone = [said(ask(server, b)) for b in many]
            assert [said(x) for x in together(server, many)] == alone


def mean(choice: Choice) -> float:
    scores = [t["logprob"] for t in choice["logprobs"]]
    return sum(scores) / len(scores)  # type: ignore[no-any-return]


def scored(server: Server, features: set[str]) -> list[Any]:
    """The log-probabilities of the choices' first tokens, which a grammar leaves as they are."""
    return [c["logprobs"][0]["top_logprobs"] for c in ask(server, request(features | {"logprobs"}))]


def together(server: Server, bodies: list[dict[str, Any]]) -> list[list[Choice]]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda b: ask(server, b), bodies))


@pytest.mark.parametrize(("a", "b"), combinations(FEATURES, 2), ids=lambda x: str(x))
def test_pair(small: Server, a: str, b: str) -> None:
    if (a, b) in REFUSED:
        status, reply = small.post("/v1/chat/completions", request({a, b}))
        assert (status, reply["error"]["param"]) == (400, REFUSED[a, b])
        return
    check(small, a, {b})
    check(small, b, {a})
    small.wait_idle()


def test_preemptions_did_happen(small: Server) -> None:
    check(small, "preemption", {"n"})
    assert small.metric("octavo_preemptions_total") > 0
