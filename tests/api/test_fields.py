"""Fields at every depth, values at their edges, vLLM's own fields, and what clients send back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI

from tests.api.server import Server, serving

USER = [{"role": "user", "content": "hi"}]
HUGE = 10**400
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(server: Server, **changes: Any) -> tuple[int, Any]:
    body = {"messages": USER, "max_tokens": 2, "temperature": 0} | changes
    return server.post("/v1/chat/completions", body)


def text(server: Server, **changes: Any) -> tuple[int, Any]:
    return server.post("/v1/completions", {"prompt": "hi", "max_tokens": 2} | changes)


def lines(server: Server, path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    _, raw = server.call("POST", path, json.dumps(body | {"stream": True}).encode())
    events = [line[6:] for line in raw.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(e) for e in events[:-1]]


SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
MISSPELT: list[tuple[str, dict[str, Any]]] = [
    ("frobnicate", {"frobnicate": None}),
    ("stream_options.usage", {"stream": True, "stream_options": {"usage": True}}),
    ("response_format.strict", {"response_format": SCHEMA | {"strict": True}}),
    ("response_format.json_schema.strikt", {"response_format": {"type": "json_schema", "json_schema": SCHEMA["json_schema"] | {"strikt": True}}}),
    ("structured_outputs.whitespace_pattern", {"structured_outputs": {"regex": "a", "whitespace_pattern": ""}}),
    ("tools[0].strict", {"tools": [TOOL | {"strict": True}]}),
    ("tools[0].function.arguments", {"tools": [{"function": TOOL["function"] | {"arguments": {}}}]}),
    ("tool_choice.name", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}, "name": "f"}}),
    ("tool_choice.function.strict", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f", "strict": True}}}),
    ("messages[0].contents", {"messages": [USER[0] | {"contents": "x"}]}),
    ("messages[1].prefix", {"messages": [*USER, {"role": "assistant", "content": "x", "prefix": True}]}),
    ("messages[0].content[1].colour", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "colour": 1}]}]}),
    ("messages[1].tool_calls[0].arguments", {"messages": [*USER, {"role": "assistant", "tool_calls": [CALL | {"arguments": "{}"}]}]}),
    ("messages[1].tool_calls[0].function.args", {"messages": [*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "args": {}}}]}]}),
    ("messages[0].audio", {"messages": [USER[0] | {"audio": {"id": "a"}}]}),
    ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
    ("messages[1].tool_calls[0].function.arguments", {"messages": [*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}]}]}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), MISSPELT, ids=[p for p, _ in MISSPELT])
def test_refused_by_the_whole_path(server: Server, path: str, body: dict[str, Any]) -> None:
    status, reply = chat(server, **body)
    assert (status, reply["error"]["param"]) == (400, path)
    assert path.removesuffix(".type") in reply["error"]["message"]


def test_names_inside_schemas_and_arguments_are_the_users(server: Server) -> None:
    inner = {"strikt": 1, "frobnicate": {"x": [1]}}
    tool = {"function": {"name": "f", "parameters": {"type": "object", "x-mine": inner}}}
    call = CALL | {"function": {"name": "f", "arguments": json.dumps(inner)}}
    said = [
        *USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]
    assert chat(server, messages=said, tools=[tool])[0] == 200


BIG = ("max_tokens", "min_tokens", "top_k", "prompt_logprobs", "seed", "n", "best_of", "priority", "timeout",
       "temperature", "logprobs", "beam_width", "length_penalty", "repetition_penalty")  # fmt: skip


@pytest.mark.parametrize("field", BIG)
@pytest.mark.parametrize(
    "value",
    [HUGE, -HUGE, 2**63, -(2**63) - 1, 2**31],
    ids=["huge", "-huge", "2**63", "-2**63-1", "2**31"],
)
def test_huge_numbers(server: Server, field: str, value: int) -> None:
    status, reply = text(server, **{field: value})
    expected = {("seed", 2**31): (200, None), ("max_tokens", 2**31): (400, "prompt")}
    answer = (status, reply.get("error", {}).get("param"))
    assert answer == expected.get((field, value), (400, field))


@pytest.mark.parametrize(
    ("key", "bias"),
    [
        ("abc", 1),
        ("-1", 1),
        ("49152", 1),
        ("9" * 400, 1),
        ("1", 101),
        ("1", HUGE),
        ("1", True),
        ("1", "x"),
        ("1", None),
        ("٣", 1),
        ("1_0", 1),
    ],
)
def test_logit_bias_names_the_key(server: Server, key: str, bias: Any) -> None:
    status, reply = text(server, logit_bias={"7": 1, key: bias})
    assert (status, reply["error"]["param"]) == (400, "logit_bias")
    assert repr(key[:32]) in reply["error"]["message"]


@pytest.mark.parametrize(
    "name", ["self", "source", "messages_", "context", "budget", "args", "kwargs"]
)
def test_any_name_may_go_to_the_template(server: Server, name: str) -> None:
    assert chat(server, chat_template_kwargs={name: 1})[0] == 200
    assert chat(server, chat_template_kwargs={name: HUGE})[0] == 400


@pytest.mark.parametrize(
    ("path", "param", "body"),
    [
        ("/v1/chat/completions", "messages", {"messages": USER, "max_tokens": 8192}),
        (
            "/v1/chat/completions",
            "messages",
            {"messages": [{"role": "user", "content": "a " * 9000}]},
        ),
        ("/v1/completions", "prompt", {"prompt": "hi", "max_tokens": 8192}),
        ("/v1/completions", "prompt", {"prompt": [5] * 9000, "max_tokens": 1}),
        ("/v1/completions", "prompt", {"prompt": [[5], [5] * 9000], "max_tokens": 1}),
        ("/v1/embeddings", "input", {"input": [5] * 9000}),
        ("/v1/score", "text_1", {"text_1": "a " * 9000, "text_2": "b"}),
        ("/v1/rerank", "documents", {"query": "q", "documents": ["a " * 9000]}),
    ],
)
def test_context_overflow_in_openais_words(
    server: Server, path: str, param: str, body: dict[str, Any]
) -> None:
    status, reply = server.post(path, body)
    error = reply["error"]
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert error["message"].startswith(
        "This model's maximum context length is 8192 tokens. However, you requested "
    )
    assert f"in the {param}" in error["message"]


def test_context_overflow_as_clients_know_it(server: Server) -> None:
    """LangChain has an error of its own for it, which it makes by the words."""
    model = ChatOpenAI(base_url=server.url + "/v1", api_key="x", model="smollm2", max_retries=0)
    with pytest.raises(openai.BadRequestError) as error:
        model.invoke("a " * 9000)
    assert "ContextOverflow" in type(error.value).__name__


def test_the_model_may_be_left_out(server: Server) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": USER, "max_tokens": 1}), ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/embeddings", {"input": "a"}), ("/v1/rerank", {"query": "a", "documents": ["b"]}), ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ):  # fmt: skip
        status, reply = server.post(path, body)
        assert (status, reply["model"]) == (200, "smollm2")


def test_what_the_openai_package_gives_can_be_sent_back(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
    options: dict[str, Any] = {
        "model": "smollm2",
        "max_tokens": 60,
        "temperature": 0,
        "tools": [TOOL],
        "tool_choice": "required",
    }
    first = client.chat.completions.create(messages=USER, **options).choices[0].message
    assert first.tool_calls
    dumps = [first.model_dump(), first.model_dump(exclude_none=True), first]
    more = {
        "annotations": [],
        "audio": None,
        "function_call": None,
        "parsed": None,
        "cache_control": {"type": "ephemeral"},
        "provider_specific_fields": None,
    }
    dumps.append(first.model_dump() | more)
    calls = [c.model_dump() | {"index": i} for i, c in enumerate(first.tool_calls)]
    for call in calls:
        call["function"]["parsed_arguments"] = None
    dumps.append({"role": "assistant", "content": None, "tool_calls": calls})
    results = [{"role": "tool", "tool_call_id": c.id, "content": "1"} for c in first.tool_calls]
    texts = {
        client.chat.completions.create(
            messages=[*USER, dump, *results], model="smollm2", max_tokens=8, temperature=0
        ).choices[0].message.content
        for dump in dumps
    }  # fmt: skip
    assert len(texts) == 1


def test_top_logprobs_hold_the_sampled_token_under_names_of_its_own(server: Server) -> None:
    _, reply = server.post("/tokenize", {"prompt": "🙂"})
    halves = reply["tokens"]  # bytes that are no text alone
    assert len(halves) > 1
    bias = {str(t): 100 for t in halves}
    _, reply = text(
        server, logprobs=len(halves), logit_bias=bias, max_tokens=12, seed=3, temperature=2
    )
    logprobs = reply["choices"][0]["logprobs"]
    assert any(t.startswith("bytes:\\x") for t in logprobs["tokens"])
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == logprob
        assert len(top) in (len(halves), len(halves) + 1)
    _, named = text(
        server,
        logprobs=1,
        return_tokens_as_token_ids=True,
        logit_bias=bias,
        max_tokens=12,
        seed=3,
        temperature=2,
        return_token_ids=True,
    )
    choice = named["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert all(
        t in top
        for t, top in zip(
            choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True
        )
    )


def test_token_ids(server: Server) -> None:
    """vLLM's return_token_ids: whole and streamed, with every generated token in order."""
    prompt = server.post("/tokenize", {"prompt": "One, two,"})[1]["tokens"]
    asked = {
        "prompt": ["One, two,", "Monday"],
        "max_tokens": 6,
        "temperature": 0,
        "n": 2,
        "return_token_ids": True,
    }
    _, whole = server.post("/v1/completions", asked)
    assert (
        whole["choices"][0]["prompt_token_ids"] == whole["choices"][1]["prompt_token_ids"] == prompt
    )
    assert whole["choices"][2]["prompt_token_ids"] != prompt
    assert all(len(c["token_ids"]) == 6 for c in whole["choices"])
    back = server.post("/detokenize", {"tokens": whole["choices"][0]["token_ids"]})[1]["prompt"]
    assert back == whole["choices"][0]["text"]
    streamed: dict[int, list[int]] = {}
    prompts: dict[int, list[int]] = {}
    for chunk in lines(server, "/v1/completions", **asked):
        for c in chunk["choices"]:
            streamed.setdefault(c["index"], []).extend(c.get("token_ids", []))
            prompts.setdefault(c["index"], c.get("prompt_token_ids"))
    assert streamed == {c["index"]: c["token_ids"] for c in whole["choices"]}
    assert prompts == {c["index"]: c["prompt_token_ids"] for c in whole["choices"]}

    conversation = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 40,
        "return_token_ids": True,
    }
    _, reply = server.post("/v1/chat/completions", conversation)
    assert (
        reply["prompt_token_ids"]
        == server.post("/tokenize", {"messages": conversation["messages"]})[1]["tokens"]
    )
    ids = reply["choices"][0]["token_ids"]
    assert (
        reply["choices"][0]["finish_reason"] == "stop"
        and len(ids) == reply["usage"]["completion_tokens"]
    )
    chunks = lines(server, "/v1/chat/completions", **conversation)
    assert chunks[0]["prompt_token_ids"] == reply["prompt_token_ids"]
    assert [i for c in chunks for i in c["choices"][0].get("token_ids", [])] == ids
    plain = lines(server, "/v1/chat/completions", **conversation | {"return_token_ids": False})
    assert not [k for c in plain for k in (*c, *c["choices"][0]) if "token_ids" in k]


def test_continuous_usage(server: Server) -> None:
    """Every chunk with the usage of its choice so far, the last with that of all."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {
        "messages": USER,
        "max_tokens": 6,
        "temperature": 0,
        "n": 2,
        "stream_options": options,
        "ignore_eos": True,
    }
    chunks = lines(server, "/v1/chat/completions", **body)
    prompt = chunks[0]["usage"]["prompt_tokens"]
    for index in (0, 1):
        counts = [c["usage"] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        tokens = [u["completion_tokens"] for u in counts]
        assert (
            tokens[0] == 0 and tokens == sorted(tokens) and tokens[-1] == 6 and len(set(tokens)) > 3
        )
        assert all(u["total_tokens"] == prompt + u["completion_tokens"] for u in counts)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 12
    quiet = lines(
        server,
        "/v1/chat/completions",
        **body | {"stream_options": {"continuous_usage_stats": True}},
    )
    assert not any("usage" in c for c in quiet)


def test_continuing_the_last_message(server: Server) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    begun = {"role": "assistant", "content": "The capital of"}
    _, whole = chat(server, messages=[question], max_tokens=20)
    _, rest = chat(server, messages=[question, begun], max_tokens=20, continue_final_message=True)
    assert (
        "The capital of" + rest["choices"][0]["message"]["content"]
        == whole["choices"][0]["message"]["content"]
    )
    asked = server.post("/tokenize", {"messages": [question]})[1]["tokens"]
    left = server.post(
        "/tokenize", {"messages": [question, begun], "continue_final_message": True}
    )[1]["tokens"]
    assert left == asked + server.post("/tokenize", {"prompt": "The capital of"})[1]["tokens"]
    closed = server.post("/tokenize", {"messages": [question], "add_generation_prompt": False})[1][
        "tokens"
    ]
    assert asked[: len(closed)] == closed and len(closed) < len(asked)
    spaced = {"role": "assistant", "content": "The capital of "}
    assert (
        server.post("/tokenize", {"messages": [question, spaced], "continue_final_message": True})[
            1
        ]["tokens"][: len(left)]
        == left
    )
    status, reply = chat(server, continue_final_message=True, add_generation_prompt=True)
    assert (status, reply["error"]["param"]) == (400, "continue_final_message")
    empty = [question, {"role": "assistant", "content": " "}]
    assert chat(server, messages=empty, continue_final_message=True)[0] == 400
    assert chat(server, add_generation_prompt=False)[1]["choices"][0]["message"]["role"] == "user"


def test_salts_keep_cached_prefixes_apart(smollm2: Path, tmp_path: Path) -> None:
    with serving(
        "smollm2", "--offline", "--api-key", "a", "--api-key", "b", log=tmp_path / "log"
    ) as s:

        def cached(key: str, **salt: str) -> int:
            body = {"messages": USER, "max_tokens": 1} | salt
            _, reply = s.post("/v1/chat/completions", body, {"authorization": f"Bearer {key}"})
            return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

        for key, salt in (
            ("a", {}),
            ("a", {"cache_salt": "x"}),
            ("a", {"cache_salt": "y"}),
            ("b", {"cache_salt": "x"}),
        ):
            assert cached(key, **salt) == 0
            assert cached(key, **salt) > 0
        status, reply = s.post(
            "/v1/chat/completions",
            {"messages": USER, "cache_salt": ""},
            {"authorization": "Bearer a"},
        )
        assert (status, reply["error"]["param"]) == (400, "cache_salt")
