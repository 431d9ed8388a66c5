"""Tool calls against a real server, with the clients people use."""

from __future__ import annotations

import json
from typing import Any

import instructor
import jsonschema
import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from tests.api.server import Server
from tests.api.test_forced import streamed

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME = {
    "type": "function",
    "function": {  # closed: a hot model would go on adding properties
        "name": "get_time",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=server.url + "/v1", api_key="none", max_retries=0, _strict_response_validation=True
    )


def valid(call: Any) -> dict[str, Any]:
    assert call.id.startswith("call_") and call.type == "function"
    arguments = json.loads(call.function.arguments)
    tool = {"get_weather": WEATHER, "get_time": TIME}[call.function.name]
    jsonschema.validate(arguments, tool["function"]["parameters"])
    return arguments  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", range(3))
def test_required(client: openai.OpenAI, seed: int) -> None:
    reply = client.chat.completions.create(
        model="smollm2", messages=ASK, tools=[WEATHER, TIME], tool_choice="required",
        parallel_tool_calls=False, temperature=1.5, seed=seed, max_tokens=200,
    ).choices[0]  # type: ignore[call-overload]  # fmt: skip
    assert reply.finish_reason == "tool_calls" and reply.message.content is None
    (call,) = reply.message.tool_calls
    valid(call)


class Point(BaseModel):
    x: int = Field(ge=0, le=9)
    y: int = Field(ge=0, le=9)


class Shape(BaseModel):
    name: str = Field(max_length=8)
    corner: Point
    inside: list[Shape] = Field(default=[], max_length=1)


REFERRING: dict[str, dict[str, Any]] = {
    "nested": Shape.model_json_schema(),
    "definitions": {
        "type": "object", "definitions": {"size/unit": {"enum": ["cm", "m"]}}, "required": ["unit"],
        "properties": {"unit": {"$ref": "#/definitions/size~1unit"}},
    },
    "anchor": {
        "$id": "https://example.org/tool", "type": "object", "$defs": {"c": {"$anchor": "colour", "enum": ["red"]}},
        "properties": {"c": {"$ref": "#colour"}}, "required": ["c"], "additionalProperties": False,
    },
    "relative": {
        "$id": "https://example.org/tool", "type": "object", "$defs": {"c": {"$id": "colour", "enum": ["red"]}},
        "properties": {"c": {"$ref": "colour"}}, "required": ["c"], "additionalProperties": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REFERRING)
def test_references_in_parameters(client: openai.OpenAI, name: str) -> None:
    """`$ref` means what it does in the tool's own document: nothing of the call is in arguments."""
    schema = REFERRING[name]
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for seed in (1, 2, 3):  # of some, shapes are nested without end
        reply = client.chat.completions.create(
            model="smollm2", messages=ASK, tools=[tool], tool_choice="required", seed=seed,
            parallel_tool_calls=False, temperature=0.8, max_tokens=400,
        ).choices[0]  # type: ignore[call-overload]  # fmt: skip
        (call,) = reply.message.tool_calls
        assert reply.finish_reason == "tool_calls"
        arguments = json.loads(call.function.arguments)
        jsonschema.Draft202012Validator(schema).validate(arguments)


def test_only_what_is_declared_is_written(client: openai.OpenAI) -> None:
    """A hot model invents properties wherever it may."""
    declared = {
        "city": {"type": "string", "maxLength": 9},
        "where": {"properties": {"n": {"enum": [1]}}, "type": "object"},
    }
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": declared}},
    }
    bare = {"type": "function", "function": {"name": "g"}}
    for seed in range(6):
        reply = client.chat.completions.create(
            model="smollm2", messages=ASK, tools=[tool, bare], tool_choice="required", seed=seed,
            parallel_tool_calls=False, temperature=2, max_tokens=400,
        ).choices[0]  # type: ignore[call-overload]  # fmt: skip
        (call,) = reply.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert arguments.keys() <= (declared.keys() if call.function.name == "f" else set())
        assert arguments.get("where", {}).keys() <= {"n"}


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_unless_the_model_begins_another(server: Server, stream: bool) -> None:
    """Greedy: after a call only what the model writes by itself is a second one."""
    body = {"model": "smollm2", "messages": ASK, "tools": [WEATHER, TIME], "tool_choice": "required",
            "temperature": 0, "max_tokens": 300}  # fmt: skip
    if stream:
        (made,) = streamed(server, body)
        calls, finish, text = made["calls"], made["finish"], made["content"]
    else:
        reply = server.post("/v1/chat/completions", body)[1]["choices"][0]
        calls, finish = reply["message"]["tool_calls"], reply["finish_reason"]
        text = reply["message"]["content"] or ""
    assert (len(calls), finish, text) == (1, "tool_calls", "")


def test_named_and_streamed_alike(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "smollm2", "messages": ASK, "tools": [WEATHER, TIME], "max_tokens": 200, "seed": 4,
        "temperature": 1, "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    }  # fmt: skip
    whole = client.chat.completions.create(**options).choices[0].message.tool_calls[0]
    assert whole.function.name == "get_weather"
    valid(whole)
    name, fragments, finish = None, [], None
    for chunk in client.chat.completions.create(**options, stream=True):
        (choice,) = chunk.choices
        finish = choice.finish_reason or finish
        assert not choice.delta.content
        for call in choice.delta.tool_calls or []:
            assert call.index == 0
            name = name or call.function.name
            fragments.append(call.function.arguments)
    assert (name, "".join(fragments)) == ("get_weather", whole.function.arguments)
    assert len([f for f in fragments if f]) > 2 and finish == "tool_calls"


def test_auto_answers_in_text_or_calls(client: openai.OpenAI) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    for tools in ([WEATHER], [strict]):
        message = client.chat.completions.create(
            model="smollm2", messages=ASK, tools=tools, max_tokens=100
        ).choices[0].message  # type: ignore[call-overload]  # fmt: skip
        assert message.content or message.tool_calls
        for call in message.tool_calls or []:
            if tools == [strict]:
                valid(call)


def test_the_conversation_goes_on(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Paris", "unit": "celsius"}'}}  # fmt: skip
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees, sunny"},
    ]
    reply = client.chat.completions.create(
        model="smollm2", messages=messages, tools=[WEATHER], tool_choice="none", max_tokens=40
    )  # type: ignore[call-overload]
    assert reply.choices[0].message.content and not reply.choices[0].message.tool_calls
    for wrong in (
        [*ASK, {"role": "tool", "content": "x"}],
        [
            *ASK,
            {
                "role": "assistant",
                "tool_calls": [{**call, "function": {"name": "f", "arguments": "{"}}],
            },
        ],
    ):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="smollm2", messages=wrong)  # type: ignore[arg-type]


def test_several_calls_and_choices(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="smollm2", messages=ASK, tools=[TIME, WEATHER], tool_choice="required", n=3, temperature=1,
        seed=2, max_tokens=150, logprobs=True, top_logprobs=2,
    )  # type: ignore[call-overload]  # fmt: skip
    for choice in reply.choices:
        calls = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and calls
        for call in calls:
            valid(call)
        assert len({c.id for c in calls}) == len(calls)
        assert choice.logprobs.content


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


@pytest.mark.parametrize(
    "mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON]
)
def test_instructor(client: openai.OpenAI, mode: instructor.Mode) -> None:
    made = instructor.from_openai(client, mode=mode).chat.completions.create(
        model="smollm2", response_model=Person, max_retries=0, max_tokens=100,
        messages=[{"role": "user", "content": "John is 25 years old. Give his name and age."}],
    )  # fmt: skip
    assert isinstance(made, Person) and made.name


def test_openai_parse(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(
        model="smollm2", messages=ASK, response_format=Person, max_tokens=100
    )
    assert isinstance(reply.choices[0].message.parsed, Person)


def test_langchain(server: Server) -> None:
    model = ChatOpenAI(
        model="smollm2", base_url=server.url + "/v1", api_key="none", max_tokens=100, temperature=0
    )  # type: ignore[call-arg, arg-type]
    for method in ("json_schema", "function_calling"):
        made = model.with_structured_output(Person, method=method).invoke("John is 25 years old.")
        assert isinstance(made, Person)
    bound = model.bind_tools([WEATHER], tool_choice="get_weather")
    (call,) = bound.invoke("What is the weather in Paris?").tool_calls
    assert call["name"] == "get_weather" and call["args"]["unit"] in ("celsius", "fahrenheit")
