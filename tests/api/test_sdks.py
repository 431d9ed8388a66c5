"""Client libraries against a real server: answers, streams, tools, schemas, errors, leaving."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import ollama
import openai
import pytest

from tests.api.server import Server

HI = [{"role": "user", "content": "Tell me a long story about a king."}]
SCHEMA = {
    "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
}  # fmt: skip


def of_openai(server: Server) -> str:
    """What the same prompt is answered by the API that all others are compared with."""
    client = openai.OpenAI(
        base_url=server.url + "/v1", api_key="x", max_retries=0, _strict_response_validation=True
    )
    reply = client.chat.completions.create(
        model="smollm2",
        messages=HI,
        max_tokens=24,
        temperature=0,  # type: ignore[arg-type]
    )
    client.close()
    return str(reply.choices[0].message.content)


def test_anthropic(server: Server) -> None:
    client = anthropic.Anthropic(
        base_url=server.url, api_key="x", max_retries=0, _strict_response_validation=True
    )
    asked: dict[str, Any] = {"model": "smollm2", "max_tokens": 24, "messages": HI}
    made = client.messages.create(**asked)
    (block,) = made.content
    assert block.type == "text" and block.text == of_openai(server)
    assert (made.stop_reason, made.usage.output_tokens) == ("max_tokens", 24)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text == final.content[0].text and len(final.content) == 1
    assert final.stop_reason == "max_tokens"
    usage = made.usage
    count = client.messages.count_tokens(model="smollm2", messages=HI)  # type: ignore[arg-type]
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    tool = {"name": "get_weather", "input_schema": SCHEMA}
    wanted: dict[str, Any] = asked | {
        "max_tokens": 100, "tools": [tool],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }  # fmt: skip
    called = client.messages.create(**wanted)
    (use,) = called.content
    assert use.type == "tool_use" and use.input["city"] in ("Paris", "Rome")
    assert called.stop_reason == "tool_use"
    with client.messages.stream(**wanted) as stream:
        assert stream.get_final_message().content[0].input["city"] in ("Paris", "Rome")
    form = {"type": "json_schema", "schema": SCHEMA}
    formed = client.messages.create(**asked, output_config={"format": form})
    assert json.loads(formed.content[0].text)["city"] in ("Paris", "Rome")
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**asked | {"model": "nobody"})
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**asked, extra_body={"temperature": 99})
    with client.messages.stream(**asked | {"max_tokens": 2000}) as stream:
        next(iter(stream.text_stream))
    server.wait_idle()
    client.close()


def test_ollama(server: Server) -> None:
    client = ollama.Client(host=server.url)
    greedy = {"temperature": 0, "num_predict": 24}
    made = client.chat("smollm2", HI, options=greedy)
    assert made.message.content == of_openai(server)
    assert (made.done_reason, made.eval_count) == ("length", 24)
    pieces = list(client.chat("smollm2:latest", HI, stream=True, options=greedy))
    assert "".join(p.message.content or "" for p in pieces) == made.message.content
    assert [p.done for p in pieces] == [False] * (len(pieces) - 1) + [True]
    formed = client.chat("smollm2", HI, format=SCHEMA, options=greedy)
    assert json.loads(formed.message.content or "")["city"] in ("Paris", "Rome")
    said = client.generate("smollm2", "Once upon a", raw=True, options=greedy | {"seed": 1})
    assert said.response and said.eval_count == 24
    assert client.generate("smollm2").done_reason == "load"
    assert client.chat("smollm2").done_reason == "load"
    for wrong in (client.chat, client.generate):
        with pytest.raises(ollama.ResponseError, match="frequency_penalty"):
            wrong("smollm2", options={"frequency_penalty": 3})
    first, second = client.embed("smollm2", ["a king", "a queen"]).embeddings
    assert len(first) == len(second) == 576 and first != second
    assert sum(x * x for x in first) == pytest.approx(1, abs=1e-5)
    assert client.embeddings("smollm2", "a king").embedding == pytest.approx(first, abs=1e-6)
    (listed,) = client.list().models
    assert listed.model == "smollm2" and listed.details and listed.details.family == "llama"
    assert (listed.details.parameter_size, listed.details.quantization_level) == ("134.5M", "Q4_1")
    shown = client.show("smollm2")
    assert shown.capabilities == ["completion", "tools"] and "<|im_start|>" in str(shown.template)
    assert client.ps().models[0].context_length == 8192
    with pytest.raises(ollama.ResponseError, match="no model 'nobody'") as missing:
        client.chat("nobody", HI)
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"options\.temperature"):
        client.chat("smollm2", HI, options={"temperature": 99})
    left = client.chat("smollm2", HI, stream=True, options={"num_predict": 2000})
    next(left)
    left.close()
    server.wait_idle()
    client.close()
