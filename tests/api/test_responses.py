"""/v1/responses: kept, continued, streamed, in the background, over a restart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.server import Server, serving
from tests.waiting import until

HI = "Tell me a story about a king."
TOOL: Any = {
    "type": "function", "name": "get_weather", "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def server(smollm2: object, folder: Path) -> Iterator[Server]:
    data = str(folder / "data")
    with serving("smollm2", "--offline", "--data-dir", data, log=folder / "log") as s:
        yield s


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=server.url + "/v1",
        api_key="x",
        max_retries=0,
        _strict_response_validation=True,
    ) as one:
        yield one


def make(client: openai.OpenAI, given: Any = HI, **more: Any) -> Any:
    fields: dict[str, Any] = {"temperature": 0, "max_output_tokens": 12} | more
    return client.responses.create(model="smollm2", input=given, **fields)


def test_a_response_is_a_chat(client: openai.OpenAI) -> None:
    made = make(client, instructions="Be brief.")
    said: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": HI}]
    chat = client.chat.completions.create(
        model="smollm2", messages=said, temperature=0, max_tokens=12
    )
    assert made.output_text == chat.choices[0].message.content
    assert made.status == "incomplete" and made.incomplete_details.reason == "max_output_tokens"
    assert chat.usage is not None and made.usage.input_tokens == chat.usage.prompt_tokens
    assert (made.usage.output_tokens, made.usage.total_tokens) == (12, 12 + made.usage.input_tokens)
    assert client.responses.retrieve(made.id) == made


def test_turns(client: openai.OpenAI) -> None:
    """A response that follows others is that of the whole conversation."""
    first = make(client)
    second = make(client, "And then?", previous_response_id=first.id)
    third = make(client, "Why?", previous_response_id=second.id)
    said: Any = []
    for question, made in ((HI, first), ("And then?", second)):
        said += [{"role": "user", "content": question}, *made.output]
    whole = make(client, [*said, {"role": "user", "content": "Why?"}])
    assert whole.output_text == third.output_text
    assert whole.usage.input_tokens == third.usage.input_tokens
    items = client.responses.input_items.list(second.id).data
    assert [item.content[0].text for item in items] == ["And then?"]  # type: ignore[union-attr,index]


def test_items_that_a_client_called_alike_have_pages(client: openai.OpenAI) -> None:
    said = [{"type": "message", "id": "m1", "role": "user", "content": word} for word in "ab"]
    made = make(client, said)
    listed = client.responses.input_items.list(made.id, limit=1, order="asc")
    items: list[Any] = list(listed)  # all pages
    assert [item.content[0].text for item in items] == ["a", "b"]
    assert items[0].id == "m1" != items[1].id


def test_what_is_asked_for_is_told(client: openai.OpenAI) -> None:
    assert make(client, text={"verbosity": "medium"}).text.verbosity == "medium"
    assert make(client, reasoning={"effort": "none"}).reasoning.effort == "none"
    with pytest.raises(openai.BadRequestError, match="effort"):
        make(client, reasoning={"effort": "banana"})


def test_streams(client: openai.OpenAI) -> None:
    events = list(make(client, stream=True, include=["message.output_text.logprobs"]))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type.removeprefix("response.") for e in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == [
        "output_text.done", "content_part.done", "output_item.done", "incomplete"
    ]  # fmt: skip
    plain = make(client, include=["message.output_text.logprobs"])
    done = events[-1].response
    assert done.output[0].content == plain.output[0].content and done.output_text
    assert len(done.output[0].content[0].logprobs) == 12
    assert "".join(e.delta for e in events if e.type.endswith("text.delta")) == done.output_text
    assert client.responses.retrieve(done.id) == done


def test_tools_and_schemas(client: openai.OpenAI) -> None:
    more = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    made = make(client, max_output_tokens=80, **more)
    (call,) = made.output
    assert call.type == "function_call" and made.status == "completed"
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    events = list(make(client, max_output_tokens=80, stream=True, **more))
    (streamed,) = events[-1].response.output
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    answer = make(client, [result], previous_response_id=made.id, tools=[TOOL])
    assert answer.usage.input_tokens > made.usage.input_tokens
    form = {"format": {"type": "json_schema", "name": "n", "schema": TOOL["parameters"]}}
    formed = make(client, text=form, max_output_tokens=30)
    assert json.loads(formed.output_text)["city"] in ("Paris", "Rome")


def test_what_is_not_kept(client: openai.OpenAI) -> None:
    made = make(client, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        make(client, previous_response_id=made.id)
    kept = make(client)
    client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(kept.id)


def wait(client: openai.OpenAI, id: str) -> Any:
    until(lambda: client.responses.retrieve(id).status not in ("queued", "in_progress"))
    return client.responses.retrieve(id)


def test_the_background(client: openai.OpenAI, server: Server) -> None:
    queued = make(client, background=True)
    assert queued.status == "queued" and queued.output == []
    assert wait(client, queued.id).output_text == make(client).output_text
    long = make(client, background=True, max_output_tokens=4000)
    assert client.responses.cancel(long.id).status == "cancelled"
    assert client.responses.retrieve(long.id).status == "cancelled"
    server.wait_idle()
    assert client.responses.cancel(queued.id).status == "incomplete"  # it had ended
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(make(client).id)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        make(client, "word " * 9000, background=True)


def test_a_restart(server: Server, folder: Path, client: openai.OpenAI) -> None:
    kept = make(client)
    running = make(client, background=True, max_output_tokens=4000)
    server.process.kill()
    server.process.wait(10)
    data = str(folder / "data")
    with serving("smollm2", "--offline", "--data-dir", data, log=folder / "log2") as again:
        other = openai.OpenAI(base_url=again.url + "/v1", api_key="x", max_retries=0)
        assert other.responses.retrieve(kept.id) == kept
        lost = other.responses.retrieve(running.id)
        assert (lost.status, lost.error and lost.error.code) == ("failed", "server_error")
        assert make(other, "And?", previous_response_id=kept.id).output_text
        second = Server("smollm2", "--offline", "--data-dir", data, log=folder / "log3")
        assert second.process.wait(60) == 2
        assert "another server keeps its data" in second.log.read_text()
        second.stop()
        other.close()
