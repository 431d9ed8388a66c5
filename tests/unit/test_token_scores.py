"""What completions tell of tokens: prompts that are echoed, log-probabilities, where each begins."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.checkpoint import open_checkpoint
from octavo.engine.events import PromptLogprobs, Token, TokenEvent
from octavo.engine.request import Request
from octavo.generate.reply import TextDelta, TokenInfo, prompt_scores
from octavo.text import Tokenizer, load_tokenizer
from tests.unit.fake_models import ScriptedClient, fake_model, listening

PADDING = 8  # rows of an embedding that stand for no token


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(smollm2))


@dataclass
class ScoringClient(ScriptedClient):
    """Says the log-probabilities of prompts as an engine does: none of a single token."""

    async def submit(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        wanted, rest = request.params.prompt_logprobs, request.prompt[1:]
        if wanted is not None and rest:
            top = [(token, -0.25 * (token + 1)) for token in range(wanted)]
            yield PromptLogprobs(request.id, [(-1.0, top) for _ in rest])
        async for event in super().submit(request):
            yield event


def asked(
    tokenizer: Tokenizer,
    says: list[int],
    path: str,
    client: ScriptedClient | None = None,
    **body: Any,
) -> Any:
    """The reply of a model that says these tokens, whose embedding is larger than its vocabulary."""
    model = fake_model(tokenizer, "ann", client=client or ScoringClient(says))
    with listening(replace(model, vocabulary=model.vocabulary + PADDING)) as one:
        status, reply = one.json(path, body)
    assert status == 200, reply
    return reply


# -- tokens that only the model has ------------------------------------------------------------


def test_tokens_without_a_name_are_nothing_in_a_text(tokenizer: Tokenizer) -> None:
    padded = len(tokenizer.bytes)
    (word,) = tokenizer.encode("Hello", add_bos=False)
    assert tokenizer.decode([padded, word, padded + 1]) == "Hello"
    assert (tokenizer.spelled(word), tokenizer.spelled(padded)) == (b"Hello", b"")
    end = tokenizer.vocabulary["<|im_end|>"]
    assert (tokenizer.spelled(end), tokenizer.decode([end])) == (b"<|im_end|>", "")


def test_completions_take_and_tell_tokens_without_a_name(tokenizer: Tokenizer) -> None:
    padded = len(tokenizer.bytes) + PADDING - 1
    (word,) = tokenizer.encode("Hello", add_bos=False)
    path, says = "/v1/completions", [word, padded]
    reply = asked(tokenizer, says, path, prompt=[padded, word, padded], echo=True, logprobs=0)
    (choice,) = reply["choices"]
    assert choice["text"] == "HelloHello"
    assert choice["logprobs"]["tokens"] == ["", "Hello", "", "Hello", ""]
    assert choice["logprobs"]["text_offset"] == [0, 0, 5, 5, 10]
    reply = asked(tokenizer, says, path, prompt=[word, padded], prompt_logprobs=1)
    scored = reply["choices"][0]["prompt_logprobs"]
    assert scored[0] is None and set(scored[1]) == {"0", str(padded)}
    assert scored[1][str(padded)] == {"logprob": -1.0, "decoded_token": ""}
    reply = asked(tokenizer, says, "/completion", prompt=[padded, word], n_probs=1)
    assert (reply["prompt"], reply["content"]) == ("Hello", "Hello")
    told = [(one["token"], one["bytes"]) for one in reply["completion_probabilities"]]
    assert told == [("Hello", list(b"Hello")), ("", [])]


# -- prompts -----------------------------------------------------------------------------------


def test_a_prompt_of_one_token_is_echoed_with_its_token(tokenizer: Tokenizer) -> None:
    hello, world = tokenizer.encode("Hello world", add_bos=False)
    path, says = "/v1/completions", [world, hello]
    (choice,) = asked(tokenizer, says, path, prompt=[hello], echo=True, logprobs=0)["choices"]
    assert choice["text"] == "Hello worldHello"
    assert choice["logprobs"]["tokens"] == ["Hello", " world", "Hello"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert choice["logprobs"]["text_offset"] == [0, 5, 11]
    reply = asked(
        tokenizer, says, path, prompt=[[hello], [world], [hello, world]], prompt_logprobs=0
    )
    second = {str(world): {"logprob": -1.0, "decoded_token": " world"}}
    assert [c["prompt_logprobs"] for c in reply["choices"]] == [[None], [None], [None, second]]
    unasked = asked(tokenizer, says, path, prompt=[hello], echo=True, logprobs=0)["choices"][0]
    assert "prompt_logprobs" not in unasked


@pytest.mark.parametrize(("logprobs", "top"), [(None, 2), (0, 2), (1, 0), (1, 2), (2, 1)])
def test_an_echo_does_not_hide_the_prompts_log_probabilities(
    tokenizer: Tokenizer, logprobs: int | None, top: int
) -> None:
    """Each has as many alternatives as were asked for, besides the token itself."""
    hello, world = tokenizer.encode("Hello world", add_bos=False)
    body = {"prompt": [hello, world], "echo": True, "logprobs": logprobs, "prompt_logprobs": top}
    (choice,) = asked(tokenizer, [hello], "/v1/completions", **body)["choices"]
    assert choice["text"] == "Hello worldHello"
    first, second = choice["prompt_logprobs"]
    assert first is None and set(second) == {str(world), *map(str, range(top))}
    if logprobs is None:
        assert choice["logprobs"] is None
    else:
        assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -0.5]
        assert len(choice["logprobs"]["top_logprobs"][1]) == 1 + logprobs


def test_the_texts_of_a_beam_search_share_their_prompts_scores() -> None:
    scores = [TokenInfo(5, None, []), TokenInfo(6, -1.0, [])]
    told, silent = TextDelta(0, "a", prompt=scores), TextDelta(1, "b")
    assert prompt_scores([[5, 6]], [[silent, told], [silent]]) == [scores, scores]
    one = [TokenInfo(7, None, [])]
    assert prompt_scores([[7], [5, 6]], [[silent], [silent], [told], []]) == [
        one, one, scores, scores
    ]  # fmt: skip
    assert prompt_scores([[5, 6]], [[silent]]) == [[]]


@dataclass
class ChoosingClient(ScoringClient):
    """Says a short text for an even seed, and a long one, less likely by token, for an odd one."""

    async def submit(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        odd = (request.params.seed or 0) % 2
        said, logprob = (self.tokens[:4], -0.5) if odd else (self.tokens[:1], -0.4)
        async for event in ScoringClient(said).submit(request):
            is_token = isinstance(event, Token)
            yield msgspec.structs.replace(event, logprob=logprob) if is_token else event


@pytest.mark.parametrize("more", [{}, {"logprobs": 0}, {"prompt_logprobs": 0}])
def test_the_best_is_the_best_with_an_echo(tokenizer: Tokenizer, more: dict[str, int]) -> None:
    """With its prompt's log-probabilities, which are lower, a longer text has the better mean."""
    a, b, c, d = tokenizer.encode("Hello world and all", add_bos=False)
    body = {"prompt": [a, b, c, d], "best_of": 2, "seed": 0} | more
    texts = []
    for echo in (False, True):
        client = ChoosingClient([b, c, c, c])
        reply = asked(tokenizer, [], "/v1/completions", client, **body, echo=echo)
        texts.append(reply["choices"][0]["text"])
    assert texts == [" world", "Hello world and all world"]


# -- where tokens begin ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_count_characters_that_several_tokens_hold(
    tokenizer: Tokenizer, stream: bool
) -> None:
    text = "a \N{GRINNING FACE} b \u4f60\u597d c"
    says = tokenizer.encode(text, add_bos=False)
    body = {"model": "ann", "prompt": "x", "max_tokens": len(says), "logprobs": 0}
    model = fake_model(tokenizer, "ann", client=ScoringClient(says))
    with listening(model) as one:
        status, reply = one.ask("/v1/completions", body | {"stream": stream})
    assert status == 200
    lines = reply.splitlines() if stream else [f"data: {reply}"]
    data = [msgspec.json.decode(x[6:]) for x in lines if x.startswith("data: {")]
    found = [
        at
        for d in data
        for c in d["choices"]
        for at in (c["logprobs"] or {"text_offset": []})["text_offset"]
    ]
    whole = [len(tokenizer.decode(says[:i])) for i in range(len(says))]
    parts = [tokenizer.decode(says[:i]).endswith("\ufffd") for i in range(len(says))]
    assert any(parts) and len(found) == len(says)
    assert found == [at - part for at, part in zip(whole, parts, strict=True)]
