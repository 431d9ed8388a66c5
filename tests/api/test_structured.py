"""Constraints over HTTP: schemas, regular expressions, choices, grammars; hostile ones; the SDKs."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import jsonschema
import pytest

from tests.api.server import Server

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def chat(server: Server, **changes: Any) -> Any:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Describe a person."}],
        "max_tokens": 120,
    } | changes
    status, reply = server.post("/v1/chat/completions", body)
    assert status == 200, reply
    return reply["choices"][0] if body.get("n", 1) == 1 else reply["choices"]


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value, "strict": True}}


@pytest.mark.parametrize("seed", range(4))
def test_json_schema(server: Server, seed: int) -> None:
    choice = chat(server, response_format=schema(PERSON), temperature=1.5, seed=seed)
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)


def test_json_object(server: Server) -> None:
    choice = chat(server, response_format={"type": "json_object"}, max_tokens=400)
    assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"regex": r"[0-9]{3}/[a-f]{1,9}x"}, r"[0-9]{3}/[a-f]{1,9}x"),
        ({"choice": ["Paris", 'a "quoted"\nline', "☃"]}, 'Paris|a "quoted"\nline|☃'),
        ({"grammar": 'start: "yes" | "no" "!"~1..9'}, r"yes|no!{1,9}"),
        ({"grammar": 'root ::= ("a" | "b"){2} "c"'}, r"[ab][ab]c"),
        ({"json": {"enum": [1, "two"]}}, r'1|"two"'),
        ({"json": '{"const": [true]}'}, r"\[true\]"),
    ],
)
def test_structured_outputs(server: Server, outputs: dict[str, Any], pattern: str) -> None:
    texts = chat(server, structured_outputs=outputs, n=3, temperature=2, seed=1, logprobs=True)
    for choice in texts:
        text = choice["message"]["content"]
        assert re.fullmatch(pattern, text) and choice["finish_reason"] == "stop", text
        shown = b"".join(bytes(t["bytes"]) for t in choice["logprobs"]["content"])
        assert shown.decode() == text


def test_forced_tokens_take_no_steps(server: Server) -> None:
    """A text with one reading only: tokens whose log-probabilities nobody asked for are not computed."""
    text = "The quick brown fox jumps over the lazy dog."
    before = server.metric("octavo_steps_total")
    choice = chat(server, structured_outputs={"choice": [text]})
    assert choice["message"]["content"] == text
    free = server.metric("octavo_steps_total") - before
    chat(server, structured_outputs={"choice": [text]}, logprobs=True, speculation="off")
    counted = server.metric("octavo_steps_total") - before - free
    tokens = server.post("/tokenize", {"prompt": text, "add_special_tokens": False})[1]["count"]
    assert free <= 2 < tokens - 1 <= counted  # a step may also bring the end of another request


HOSTILE = [
    *({"type": "string", "pattern": p} for p in (
        "*", "^?[0-9]$", "(?<=x)*", "(", r"\1", "[z-a]", "a{2,1}", r"\p{Foo}",
        "[" * 40_000, "[" * 4_000, "[" * 4_000 + "\\", "(" * 60_000,
    )),
    {"$ref": "#"}, {"$ref": "http://127.0.0.1:9/s"}, {"$ref": "file:///etc/passwd"}, {"$dynamicRef": "#x"},
    {"enum": [str(i) for i in range(100_000)]}, {"type": "object", "properties": {f"p{i}": {} for i in range(20_000)}},
    {"type": "string", "maxLength": 10**12},
    {"type": "integer", "minimum": 5, "maximum": 1}, {"type": 123}, {"type": "hiccup"}, {"anyOf": []}, {"type": "string", "format": "x"},
]  # fmt: skip
TAKEN = [
    *({"type": "string", "pattern": p} for p in (
        "^+[a-z]$", "^{2}x$", "(a{1,1000}){1,1000}", "^(a+)+b$", "(a|a)*b", "(.*a){25}", "a{1,2000000000}",
        "([a-z]{1000}){1000}", "(?:x?){2000}x{2000}",
    )),
    {"type": "array", "minItems": 10**9}, {"allOf": [{"type": "string"}] * 10_000},
]  # fmt: skip
GRAMMARS = [
    "start: " + "(" * 60_000 + '"a"' + ")" * 60_000,
    "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(5000)), 'r5000 ::= "x"']),
    "root ::= " + "(" * 6_000 + '"a"' + ")" * 6_000,
    'root ::= root "a"', "start: undefined_rule", 'start: "a"\nstart: "b"', "start: /(/",
    "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(5000)), 'r5000: "x"']),
]  # fmt: skip


BACKTRACKING = {"type": "string", "pattern": "^(a+)+$"}


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def nested(depth: int) -> bytes:
    inner = b'{"type":"object","properties":{"a":' * depth + b"{}" + b"}}" * depth
    return (
        b'{"model":"smollm2","messages":[{"role":"user","content":"x"}],"max_tokens":2,'
        b'"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":' + inner + b"}}}"
    )  # fmt: skip


def test_hostile_constraints(server: Server) -> None:
    """Each is refused, or taken where it can be obeyed; another client's texts do not change."""
    canary = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 24}
    golden = server.post("/v1/completions", canary)[1]["choices"][0]["text"]
    failures: list[str] = []
    stop = threading.Event()

    def sing() -> None:
        while not stop.is_set():
            status, reply = server.post("/v1/completions", canary)
            if status != 200 or reply["choices"][0]["text"] != golden:
                failures.append(str(reply))

    singer = threading.Thread(target=sing)
    singer.start()
    engine = server.engine().pid
    plain = {"model": "smollm2", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    refused: list[Any] = [
        *(plain | {"response_format": schema(s)} for s in HOSTILE),
        *(plain | {"structured_outputs": {"grammar": g}} for g in GRAMMARS),
        *(plain | {"tools": [tool(p)], "tool_choice": "required"} for p in ({"type": 5}, {"$ref": "#/x"})),
        nested(60_000), nested(100),
    ]  # fmt: skip
    taken: list[Any] = [
        *(plain | {"response_format": schema(s)} for s in TAKEN),
        plain | {"structured_outputs": {"grammar": "root ::= "}},
        plain | {"tools": [tool({"properties": {"a": BACKTRACKING}})], "tool_choice": "required"},
    ]
    try:
        for body in refused:
            status, reply = server.post("/v1/chat/completions", body)
            assert status == 400, (status, reply, str(body)[:200])
            assert set(reply["error"]) == {"message", "type", "param", "code"}
        for body in taken:
            status, reply = server.post("/v1/chat/completions", body)
            assert status == 200, (status, reply, str(body)[:200])
    finally:
        stop.set()
        singer.join()
    assert not failures
    assert server.engine().pid == engine
    server.wait_idle()


def test_good_and_bad_in_turn(server: Server) -> None:
    """A refused constraint leaves nothing behind."""
    for i in range(30):
        bad = server.post(
            "/v1/chat/completions",
            {"model": "smollm2", "messages": [{"role": "user", "content": "x"}],
             "structured_outputs": {"grammar": f'start: "a{i}'}},
        )  # fmt: skip
        assert bad[0] == 400
        assert (
            chat(server, structured_outputs={"choice": [f"b{i}"]})["message"]["content"] == f"b{i}"
        )


def test_an_unsupported_keyword_is_named(server: Server) -> None:
    status, reply = server.post(
        "/v1/chat/completions",
        {"model": "smollm2", "messages": [{"role": "user", "content": "x"}],
         "response_format": schema({"type": "array", "uniqueItems": True})},
    )  # fmt: skip
    assert status == 400 and "uniqueItems" in reply["error"]["message"]


def test_prompt_log_probabilities(server: Server) -> None:
    """echo with max_tokens 0 scores a text; a second reading, from the cache or not, is equal."""
    body = {"model": "smollm2", "prompt": "The capital of France is Paris, " * 20, "max_tokens": 0,
            "echo": True, "logprobs": 2}  # fmt: skip
    first = server.post("/v1/completions", body)[1]["choices"][0]
    again = server.post("/v1/completions", body)[1]["choices"][0]
    assert first == again and first["text"] == body["prompt"] and first["finish_reason"] == "length"
    logprobs = first["logprobs"]
    assert logprobs["token_logprobs"][0] is None and len(logprobs["tokens"]) > 100
    assert all(p <= 0 for p in logprobs["token_logprobs"][1:])
    generated = server.post("/v1/completions", body | {"max_tokens": 3})[1]["choices"][0]
    assert (
        generated["logprobs"]["token_logprobs"][: len(logprobs["tokens"])]
        == logprobs["token_logprobs"]
    )
    assert "".join(generated["logprobs"]["tokens"]) == generated["text"]


def test_a_prompt_that_is_only_computed_is_found_again(server: Server) -> None:
    """llama.cpp's n_predict 0, streamed or not."""
    body = {"model": "smollm2", "prompt": "A prompt that is computed before. " * 20, "n_probs": 1}
    status, whole = server.post("/completion", body | {"n_predict": 0})
    assert (status, whole["content"], whole["tokens"]) == (200, "", [])
    assert (whole["stop_type"], whole["completion_probabilities"]) == ("limit", [])
    assert (whole["tokens_predicted"], whole["timings"]["predicted_n"]) == (0, 0)
    assert whole["generation_settings"]["n_predict"] == 0
    asked = json.dumps(body | {"n_predict": 0, "stream": True}).encode()
    streamed = server.call("POST", "/completion", asked)[1]
    (last,) = [json.loads(part.removeprefix("data: ")) for part in streamed.split("\n\n")[:-1]]
    assert (last["content"], last["stop"], last["stop_type"]) == ("", True, "limit")
    again = server.post("/completion", body | {"n_predict": 0})[1]
    after = server.post("/completion", body | {"n_predict": 1})[1]
    assert again["timings"]["cache_n"] == after["timings"]["cache_n"]
    assert after["timings"]["cache_n"] == whole["tokens_evaluated"] - 1
    assert server.post("/completion", {"model": "smollm2", "prompt": [5], "n_predict": 0})[0] == 200


def test_best_of(server: Server) -> None:
    body = {"model": "smollm2", "prompt": "A", "max_tokens": 6, "temperature": 1.5, "seed": 3}
    every = server.post("/v1/completions", body | {"n": 5, "logprobs": 0})[1]["choices"]
    best = server.post("/v1/completions", body | {"n": 2, "best_of": 5})[1]["choices"]

    def mean(choice: Any) -> float:
        scores = choice["logprobs"]["token_logprobs"]
        return sum(scores) / len(scores)

    ranked = sorted(every, key=mean, reverse=True)
    assert [c["text"] for c in best] == [c["text"] for c in ranked[:2]]
    assert [c["index"] for c in best] == [0, 1]


def test_words_and_ids_that_may_not_come(server: Server) -> None:
    free = chat(server, max_tokens=20)["message"]["content"]
    word = free.split()[0]
    assert word not in chat(server, max_tokens=20, bad_words=[word])["message"]["content"]
    ids = server.post("/tokenize", {"prompt": " yes no"})[1]["tokens"]
    text = chat(server, max_tokens=5, allowed_token_ids=ids, temperature=2)["message"]["content"]
    assert re.fullmatch("( yes| no){5}", text)


def test_min_tokens_holds_back_the_end(server: Server) -> None:
    short = {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 60}
    usual = server.post("/v1/chat/completions", {"model": "smollm2", **short})[1]["usage"]
    longer = usual["completion_tokens"] + 5
    held = server.post("/v1/chat/completions", {"model": "smollm2", **short, "min_tokens": longer})
    assert held[1]["usage"]["completion_tokens"] >= longer
