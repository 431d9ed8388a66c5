"""The Python API with several callers at once: nobody loses, waits for ever or changes a token."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path

import msgspec
import psutil
import pytest

import octavo
from octavo.engine.engine import Engine
from octavo.errors import EngineFailed, RequestError

PROMPTS = ["The capital of France is", "Once upon a time", "One, two, three,", "def main():"]
PARAMS = octavo.SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[octavo.LLM]:
    with octavo.LLM("smollm2", offline=True, context=1024) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: octavo.LLM) -> list[octavo.Completion]:
    return [llm.generate(p, PARAMS, progress=False)[0] for p in PROMPTS]


def test_streams_are_read_by_turns(llm: octavo.LLM, alone: list[octavo.Completion]) -> None:
    streams = [llm.stream(p, PARAMS) for p in PROMPTS]
    texts = [""] * len(streams)
    for pieces in zip_longest(*streams, fillvalue=""):
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    assert texts == [c.text for c in alone]


def test_generate_while_a_stream_is_open(llm: octavo.LLM, alone: list[octavo.Completion]) -> None:
    stream = llm.stream(PROMPTS[0], PARAMS)
    first = next(stream)
    many = llm.generate(PROMPTS, PARAMS, progress=False)
    assert [c.tokens for c in many] == [c.tokens for c in alone]
    assert first + "".join(stream) == alone[0].text


def test_threads_may_call_at_once(llm: octavo.LLM, alone: list[octavo.Completion]) -> None:
    def work(i: int) -> list[list[int]]:
        order = PROMPTS[i:] + PROMPTS[:i]
        found = [c.tokens for c in llm.generate(order, PARAMS, progress=False)]
        return found[len(PROMPTS) - i :] + found[: len(PROMPTS) - i]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(4), timeout=120))
    assert results == [[c.tokens for c in alone]] * 4
    assert llm.stats().blocks_held == 0


TALE = "There was once a tale of a fox, a crow and a piece of cheese. " * 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_choices_of_a_prompt_compute_it_once(llm: octavo.LLM, temperature: float) -> None:
    """All choices are what they are alone, of text and of a conversation; the prompt is counted,
    and computed, once."""
    params = octavo.SamplingParams(temperature=temperature, max_tokens=12, seed=20, ignore_eos=True)
    text = f"{TALE}{temperature}"
    for call in (llm.generate, llm.chat):
        before = llm.stats()
        given = call(text, params, n=6, progress=False)
        after = llm.stats()
        length = given[0].prompt_tokens
        prompts = after.prompt_tokens - before.prompt_tokens
        assert length > 120 and prompts == 6 * length
        assert prompts - (after.cached_tokens - before.cached_tokens) == (
            length - given[0].cached_tokens + 5  # and the last token once a choice
        )
        assert {c.cached_tokens for c in given} == {given[0].cached_tokens} != {length - 1}
        seeds = [msgspec.structs.replace(params, seed=20 + i) for i in range(6)]
        alone = [call(text, p, progress=False)[0].tokens for p in seeds]
        assert [c.tokens for c in given] == alone
        assert len({*map(tuple, alone)}) == (6 if temperature else 1)


def test_closed_streams_and_refusals_leave_nothing(llm: octavo.LLM) -> None:
    stream = llm.stream(PROMPTS[1], octavo.SamplingParams(temperature=0, max_tokens=900))
    next(stream)
    assert llm.stats().running == 1
    stream.close()  # type: ignore[attr-defined]
    with pytest.raises(RequestError, match="maximum context length is 1024 tokens"):
        llm.generate([[1, 2, 3], [1] * 1025], PARAMS, progress=False)
    assert (llm.stats().running, llm.stats().waiting, llm.stats().blocks_held) == (0, 0, 0)


def test_a_step_that_fails_ends_its_requests_only(
    llm: octavo.LLM, alone: list[octavo.Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Engine) -> list[octavo.Completion]:
        raise ZeroDivisionError("a fault")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", broken)
        with pytest.raises(
            EngineFailed, match=r"ZeroDivisionError in broken, line \d+ of"
        ) as failed:
            llm.generate(PROMPTS, PARAMS, progress=False)
    assert "a fault" not in str(failed.value)  # which may quote a prompt
    assert llm.stats().blocks_held == 0
    assert llm.generate(PROMPTS[0], PARAMS, progress=False)[0].tokens == alone[0].tokens


def test_a_stop_string_is_one_string(llm: octavo.LLM) -> None:
    text = llm.generate(PROMPTS[0], PARAMS, progress=False)[0].text
    word = "answer"
    assert text.startswith(" Paris.\n\nThe answer")  # which has an "a" before it
    (got,) = llm.generate(
        PROMPTS[0], octavo.SamplingParams(temperature=0, max_tokens=12, stop=word), progress=False
    )
    assert (got.text, got.finish_reason) == (text[: text.index(word)], "stop")
    with pytest.raises(RequestError, match="stop string is empty"):
        llm.generate("x", octavo.SamplingParams(stop=""), progress=False)


def test_what_was_asked_for_is_reported(llm: octavo.LLM) -> None:
    params = octavo.SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1)
    (got,) = llm.generate(PROMPTS[0], params, progress=False)
    assert got.logprobs is not None and got.top_logprobs is not None
    assert [max(top, key=lambda t: top[t]) for top in got.top_logprobs] == got.tokens
    assert [top[t] for t, top in zip(got.tokens, got.top_logprobs, strict=True)] == got.logprobs
    assert {len(top) for top in got.top_logprobs} == {2}
    assert got.prompt_logprobs is not None and got.prompt_top_logprobs is not None
    ids = llm.tokenizer.encode(PROMPTS[0])
    assert len(got.prompt_logprobs) == len(got.prompt_top_logprobs) == len(ids)
    assert got.prompt_logprobs[0] is None and got.prompt_top_logprobs[0] == {}
    for i, top in enumerate(got.prompt_top_logprobs[1:], 1):
        ((token, best),) = top.items()
        assert (got.prompt_logprobs[i] == best) == (ids[i] == token)
    plain = llm.generate(PROMPTS[0], PARAMS, progress=False)[0]
    assert plain.top_logprobs is plain.prompt_logprobs is plain.prompt_top_logprobs is None


def test_texts_parts_and_conversations(llm: octavo.LLM) -> None:
    question = "What is the capital of France?"
    messages = [{"role": "user", "content": question}]
    parts = [{"type": "text", "text": question[:9]}, {"type": "text", "text": question[9:]}]
    (expected,) = llm.chat(messages, PARAMS, progress=False)
    assert llm.chat(question, PARAMS, progress=False)[0].text == expected.text
    assert llm.encode_chat([{"role": "user", "content": parts}]) == llm.encode_chat(messages)
    two = llm.chat([messages, messages], PARAMS, progress=False)
    assert [c.text for c in two] == [expected.text] * 2
    with pytest.raises(RequestError, match="this model takes text only, not 'image_url' parts"):
        llm.encode_chat([{"role": "user", "content": [{"type": "image_url"}]}])


def test_an_idle_model_uses_no_processor_time(llm: octavo.LLM) -> None:
    llm.generate(PROMPTS[0], PARAMS, progress=False)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:  # what is done while idle has an end
        before = psutil.Process().cpu_times()
        time.sleep(0.5)
        after = psutil.Process().cpu_times()
        if (used := after.user + after.system - before.user - before.system) <= 0.02:
            return
    raise AssertionError(f"{used} s of processor time in half a second")


def test_closing_ends_the_thread_and_frees_the_model(smollm2: Path) -> None:
    gc.collect()  # models of other tests, whose threads end with them
    process, threads = psutil.Process(), threading.active_count()
    before = process.memory_info().rss
    llm = octavo.LLM("smollm2", offline=True, context=1024)
    stream = llm.stream(PROMPTS[0], octavo.SamplingParams(max_tokens=900))
    next(stream)
    loaded = process.memory_info().rss
    llm.close()
    llm.close()
    with pytest.raises(EngineFailed, match="closed"):
        list(stream)
    with pytest.raises(EngineFailed, match="closed"):
        llm.generate("x", PARAMS, progress=False)
    del llm, stream
    gc.collect()
    assert threading.active_count() == threads
    assert process.memory_info().rss - before < (loaded - before) / 2
    other = octavo.LLM("smollm2", offline=True, context=1024)
    del other
    gc.collect()
    assert threading.active_count() == threads
