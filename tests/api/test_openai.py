"""The openai package as a client of a real server."""

from __future__ import annotations

import re

import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.api.server import Server

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0)


def chat(client: openai.OpenAI, **options: object) -> ChatCompletion:
    defaults = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    return client.chat.completions.create(**{**defaults, **options})  # type: ignore[call-overload,no-any-return]


def test_chat(client: openai.OpenAI) -> None:
    reply = chat(client)
    assert "Paris" in reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.prompt_tokens == 37
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_stream_equals_whole(client: openai.OpenAI) -> None:
    for options in ({}, {"temperature": 1.0, "seed": 3, "max_tokens": 60}):
        whole = chat(client, **options).choices[0]
        stream = list(chat(client, stream=True, stream_options={"include_usage": True}, **options))
        text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
        assert text == whole.message.content
        ends = [
            c.choices[0].finish_reason for c in stream if c.choices and c.choices[0].finish_reason
        ]
        assert ends == [whole.finish_reason]
        assert stream[-1].choices == [] and stream[-1].usage.completion_tokens > 0
        assert all(c.usage is None for c in stream[:-1])
        assert len({c.id for c in stream}) == 1
        assert stream[0].choices[0].delta.role == "assistant"


def test_n_choices_equal_single_requests(client: openai.OpenAI) -> None:
    both = chat(client, n=2, temperature=1.0, seed=10, max_tokens=16)
    texts = [c.message.content for c in both.choices]
    single = [
        chat(client, temperature=1.0, seed=s, max_tokens=16).choices[0].message.content
        for s in (10, 11)
    ]
    assert texts == single and texts[0] != texts[1]
    streamed = ["", ""]
    for chunk in chat(client, n=2, temperature=1.0, seed=10, max_tokens=16, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_seed(client: openai.OpenAI) -> None:
    hot = {"temperature": 1.5, "max_tokens": 30}
    first, second, other = (
        chat(client, seed=s, **hot).choices[0].message.content for s in (1, 1, 2)
    )
    assert first == second != other


def test_stop(client: openai.OpenAI) -> None:
    reply = chat(client, stop=[" France", "unused"])
    assert reply.choices[0].message.content == "The capital of"
    assert reply.choices[0].finish_reason == "stop"
    parts = [c.choices[0].delta.content or "" for c in chat(client, stop=" is Paris", stream=True)]
    assert "".join(parts) == "The capital of France"


def test_logit_bias(client: openai.OpenAI, server: Server) -> None:
    _, tokens = server.post("/tokenize", {"prompt": " Paris"})
    (paris,) = tokens["tokens"]
    text = chat(client, logit_bias={str(paris): -100}).choices[0].message.content
    assert " Paris" not in text
    forced = chat(client, logit_bias={str(paris): 100}, max_tokens=3).choices[0].message.content
    assert forced == " Paris Paris Paris"


def test_logprobs(client: openai.OpenAI) -> None:
    reply = chat(client, logprobs=True, top_logprobs=2, max_tokens=4)
    content = reply.choices[0].logprobs.content
    assert len(content) == 4
    for entry in content:
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert len(entry.top_logprobs) == 2
    assert bytes(b for e in content for b in e.bytes).decode() == reply.choices[0].message.content


def test_completions(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="smollm2", prompt="The capital of France is", max_tokens=4, temperature=0
    )
    assert "Paris" in reply.choices[0].text and reply.choices[0].finish_reason == "length"
    many = client.completions.create(
        model="smollm2",
        prompt=["One, two,", "Monday, Tuesday,"],
        max_tokens=4,
        temperature=0,
        n=2,
        logprobs=1,
    )
    assert [c.index for c in many.choices] == [0, 1, 2, 3]
    assert many.choices[0].text == many.choices[1].text != many.choices[2].text
    assert len(many.choices[0].logprobs.tokens) == 4
    streamed = client.completions.create(
        model="smollm2", prompt="One, two,", max_tokens=4, temperature=0, stream=True
    )
    assert "".join(c.choices[0].text for c in streamed) == many.choices[0].text


def test_token_prompts(client: openai.OpenAI, server: Server) -> None:
    _, reply = server.post("/tokenize", {"prompt": "One, two,"})
    by_id = client.completions.create(
        model="smollm2", prompt=reply["tokens"], max_tokens=4, temperature=0
    )
    by_text = client.completions.create(
        model="smollm2", prompt="One, two,", max_tokens=4, temperature=0
    )
    assert by_id.choices[0].text == by_text.choices[0].text


def test_cached_tokens_are_reported(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Tell me about the cache of a processor, please."}]
    chat(client, messages=messages, max_tokens=1)
    again = chat(client, messages=messages, max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1


def test_choices_of_a_prompt_compute_it_once(client: openai.OpenAI, server: Server) -> None:
    """The metrics count the tokens of every choice, and those that were found; usage the prompt."""

    def computed() -> int:
        text = server.get("/metrics")[1]
        counts = dict(re.findall(r"octavo_(prompt|cached)_tokens_total\S* (\d+)", text))
        return int(counts["prompt"]) - int(counts["cached"])

    messages = [{"role": "user", "content": "Say something about choices. " * 40}]
    before = computed()
    reply = chat(client, messages=messages, n=4, temperature=1.0, seed=5, max_tokens=8)
    usage = reply.usage
    own = usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
    assert usage.prompt_tokens_details.cached_tokens < 40 and own > 150
    assert computed() - before == own + 3  # and the last token once a choice
    for i, choice in enumerate(reply.choices):
        (alone,) = chat(
            client, messages=messages, temperature=1.0, seed=5 + i, max_tokens=8
        ).choices
        assert alone.message.content == choice.message.content


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").id == "smollm2"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("gpt-9")
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="smollm2"):
        chat(client, model="gpt-9")


def test_context_length(client: openai.OpenAI) -> None:
    with pytest.raises(
        openai.BadRequestError,
        match="maximum context length is 8192 tokens. However, you requested 8229",
    ) as error:
        chat(client, max_tokens=8192)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        chat(client, max_tokens=8192, stream=True)  # a refusal keeps its status when streaming


def test_penalties_change_the_answer(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Repeat the word hello ten times."}]
    plain = chat(client, messages=messages, max_tokens=40).choices[0].message.content
    for option in (
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0},
        {"extra_body": {"repetition_penalty": 1.8}},
    ):
        assert (
            chat(client, messages=messages, max_tokens=40, **option).choices[0].message.content
            != plain
        )
