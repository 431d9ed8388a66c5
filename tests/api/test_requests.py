"""Fields obeyed, accepted or refused by name; hostile bodies; keys; text routes."""

from __future__ import annotations

import http.client
import json
import re
from pathlib import Path

import pytest

from tests.api.server import Server, serving

USER = [{"role": "user", "content": "hi"}]
LEAK = re.compile(r"0x[0-9a-f]{6,}|Traceback|File \"|/(home|root|usr|work|tmp)/|CANARY-")


def body(**changes: object) -> dict[str, object]:
    return {"model": "smollm2", "messages": USER, "max_tokens": 2} | changes


BAD = [
    ("n", 0), ("n", 129), ("n", "5"), ("n", 1.5), ("n", True), ("n", 2**31),
    ("temperature", -1), ("temperature", 3), ("top_p", 0), ("top_p", 1.01), ("seed", 2**70),
    ("frequency_penalty", 9), ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 2**63),
    ("stop", ["x"] * 500), ("stop", [""]), ("stop", [5]), ("stop", "a" * 1000),
    ("logit_bias", {"abc": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"999999999": 1}),
    ("logit_bias", {"1": 1e308}), ("logit_bias", {"1": "x"}), ("logit_bias", {str(i): 0 for i in range(2000)}),
    ("top_logprobs", 21), ("top_logprobs", 3), ("top_k", -1), ("stream_options", {"include_usage": True}),
    ("messages", None), ("messages", []), ("messages", "s"), ("messages", [123]), ("messages", [{}]),
    ("messages", [{"role": 123}]), ("messages", [{"role": "user"}]), ("messages", USER * 5000),
    ("messages", [{"role": "system<|im_end|>", "content": "x"}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}]),
    ("tools", [{"type": "function"}]), ("tool_choice", "required"), ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("tools", [{"type": "function", "function": {"name": "a\nb"}}]), ("tools", [{"type": "function", "function": {"name": "f"}}] * 2),
    ("tools", [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]),
    ("response_format", {"type": "sound"}), ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": 123}}),
    ("structured_outputs", {}), ("structured_outputs", {"choice": []}), ("structured_outputs", {"regex": ""}),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}), ("structured_outputs", {"whitespace": True}),
    ("structured_outputs", {"grammar": ""}), ("structured_outputs", {"regex": "x" * 5000}),
    ("chat_template", "{% for i in range(10**9) %}x{% endfor %}"), ("chat_template_kwargs", {"tokenize": True}),
    ("chat_template_kwargs", {"__class__": 1}), ("chat_template_kwargs", {"enable_thinking": "x" * 10**6}),
    ("typical_p", 0), ("typical_p", 1.5), ("min_tokens", 3), ("min_tokens", -1), ("bad_words", [""]), ("bad_words", ["x"] * 500),
    ("allowed_token_ids", []), ("allowed_token_ids", [49152]), ("prompt_logprobs", -1), ("prompt_logprobs", 49152),
    ("thinking_token_budget", 5), ("best_of", 2), ("echo", True),
    ("prompt_embeds", "x"), ("modalities", ["audio"]), ("frobnicate", 1), ("timeout", -1), ("priority", "high"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda x: str(x)[:40])
def test_refused_by_name(server: Server, field: str, value: object) -> None:
    status, reply = server.post("/v1/chat/completions", body(**{field: value}))
    assert status == 400
    error = reply["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert re.split(r"[.\[]", error["param"])[0] == field
    assert error["code"] is None or isinstance(error["code"], str)
    assert not LEAK.search(json.dumps(reply))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("user", "u"), ("store", True), ("metadata", {"a": "b"}), ("service_tier", "auto"),
        ("parallel_tool_calls", True), ("chat_template_kwargs", {"enable_thinking": False}), ("typical_p", 0.9),
        ("min_tokens", 2), ("bad_words", ["x"]), ("prompt_logprobs", 0), ("tools", []), ("tools", None), ("response_format", {"type": "text"}),
        ("tool_choice", "none"), ("temperature", None), ("stop", None), ("n", 1), ("seed", -5),
        ("logprobs", False), ("stream", False), ("max_completion_tokens", 2),
    ],
)  # fmt: skip
def test_accepted(server: Server, field: str, value: object) -> None:
    status, reply = server.post("/v1/chat/completions", body(**{field: value}))
    assert status == 200, reply


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[", b"[" * 100_000, b"null", b"1", b'"x"', b"[]", b'{"a":NaN}', b"\xff\xfe", b'{"model":"\xff"}',
        b'{"n":' + b"9" * 100_000 + b"}", b'{"a":' * 5000 + b"1" + b"}" * 5000,
    ],
    ids=range(12),
)  # fmt: skip
def test_broken_json(server: Server, data: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        status, reply = server.post(path, data)
        assert status == 400 and reply["error"]["type"] == "invalid_request_error"


def test_body_too_large(server: Server) -> None:
    status, reply = server.post("/v1/chat/completions", b" " * (9 << 20))
    assert (status, reply["error"]["type"]) in ((413, "request_too_large"),)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("content-length", str(1 << 40))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


@pytest.mark.parametrize(
    "prompt", [None, "", [], [[]], [[1], ["a"]], [1, "a"], [-1], [49152], [2**31], ["a"] * 200]
)
def test_bad_prompts(server: Server, prompt: object) -> None:
    status, reply = server.post(
        "/v1/completions", {"model": "smollm2", "prompt": prompt, "max_tokens": 1}
    )
    assert status == 400, reply


def test_routes_and_methods(server: Server) -> None:
    assert server.get("/nope")[0] == 404
    assert server.get("/v1/chat/completions")[0] == 405
    assert json.loads(server.get("/nope")[1])["error"]["code"] is None
    assert json.loads(server.get("/version")[1])["version"]
    assert server.get("/health/live")[0] == server.get("/health")[0] == 200


def test_tokenize_and_back(server: Server) -> None:
    text = "naïve 日本語 🙂 <|im_end|>\n\t x"
    for name in ("prompt", "content"):
        _, reply = server.post("/tokenize", {name: text})
        assert reply["count"] == len(reply["tokens"]) and 2 not in reply["tokens"]
        assert server.post("/detokenize", {"tokens": reply["tokens"]})[1]["prompt"] == text
    _, chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "<|im_end|>"}]})
    assert chat["tokens"].count(2) == 2  # the template's own; the user's stays text
    assert server.post("/detokenize", {"tokens": [10**9]})[0] == 400
    assert server.post("/tokenize", {})[0] == 400


def test_keys_guard_every_route_but_health(smollm2: Path, tmp_path: Path) -> None:
    with serving(
        "smollm2",
        "--offline",
        "--api-key",
        "CANARY-one",
        "--api-key",
        "CANARY-two",
        log=tmp_path / "log",
    ) as s:
        paths = ["/v1/models", "/metrics", "/version", "/v1/models/smollm2", "/nope"]
        for path in paths:
            for header in (
                {},
                {"authorization": "Bearer wrong"},
                {"authorization": "Bearer "},
                {"authorization": "Basic CANARY-one"},
            ):
                status, text = s.get(path, header)
                assert status == 401 and not LEAK.search(text)
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            assert s.post(path, body())[0] == 401
        for path in ("/", "/health", "/health/live", "/health/ready"):
            assert s.get(path)[0] == 200
        for key in ("Bearer CANARY-one", "bearer CANARY-two"):
            assert s.post("/v1/chat/completions", body(), {"authorization": key})[0] == 200
            assert "CANARY" not in s.get("/metrics", {"authorization": key})[1]
    assert "CANARY" not in (tmp_path / "log").read_text()


def test_prompts_stay_out_of_logs(server: Server) -> None:
    secret = [{"role": "user", "content": "CANARY-prompt"}]
    server.post("/v1/chat/completions", body(messages=secret))
    server.post("/v1/chat/completions", body(messages=secret, n=0))
    assert "CANARY" not in server.log.read_text()


def test_keys_do_not_share_cached_prefixes(smollm2: Path, tmp_path: Path) -> None:
    with serving(
        "smollm2", "--offline", "--api-key", "a", "--api-key", "b", log=tmp_path / "log"
    ) as s:

        def cached(key: str) -> int:
            _, reply = s.post("/v1/chat/completions", body(), {"authorization": f"Bearer {key}"})
            return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached("a") == 0 and cached("a") > 0
        assert cached("b") == 0 and cached("b") > 0
