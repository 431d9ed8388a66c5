"""A stream that breaks goes on elsewhere with the very next byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.checkpoint import open_checkpoint
from octavo.server.resume import Follower, Resume, Spent, asking, ended, told
from octavo.text import Tokenizer, load_tokenizer
from tests.unit.fake_models import Listener, ScriptedClient, fake_model, listening

STATE = {"id": "cmpl-1", "created": 5, "seed": 9}
SAYS = "one two 🙂 three stop four"


class Continuing(ScriptedClient):
    """Says what is left after the tokens that were given."""

    async def submit(self, request: Any) -> Any:
        self.requests.append(request)
        rest = ScriptedClient(self.tokens[len(request.resume) :])
        async for event in rest.submit(request):
            yield event


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(smollm2))


@pytest.fixture
def served(tokenizer: Tokenizer) -> Iterator[tuple[Listener, ScriptedClient]]:
    client = Continuing(tokenizer.encode(SAYS, add_bos=False))
    with listening(fake_model(tokenizer, "m", client=client)) as listener:
        yield listener, client


def stream(listener: Listener, tokens: list[int] | None, **fields: Any) -> str:
    resume = {} if tokens is None else {"resume": STATE | {"tokens": tokens}}
    status, text = listener.ask(
        "/v1/completions", {"prompt": "hi", "stream": True} | resume | fields
    )
    assert status == 200
    return text


@pytest.mark.parametrize(
    "fields", [{}, {"stop": "stop"}, {"stream_options": {"include_usage": True}}]
)
def test_the_rest_begins_with_the_next_byte(
    served: tuple[Listener, ScriptedClient], fields: dict[str, Any]
) -> None:
    """From wherever the stream is cut, down to every byte."""
    listener, client = served
    whole = stream(listener, [], **fields).encode()
    follower = Follower([])
    expected = follower.feed(whole)
    assert follower.spent is not None and follower.spent.completion_tokens > 4
    cuts: dict[int, bytes] = {}  # tokens told of: what had been passed on
    for size in range(len(whole)):
        short = Follower([])
        passed = short.feed(whole[:size])
        assert short.spent is None
        assert cuts.setdefault(len(short.tokens), passed) == passed
    assert len(cuts) > 2
    for count, passed in cuts.items():
        rest = Follower(list(follower.tokens[:count]))
        assert passed + rest.feed(stream(listener, rest.tokens, **fields).encode()) == expected
        assert client.requests[-1].resume == follower.tokens[:count]
        assert client.requests[-1].params.seed == 9


def test_the_time_line_begins_with_the_first_token_here(
    served: tuple[Listener, ScriptedClient],
) -> None:
    """When another server sampled its tokens, nobody knows."""
    listener, client = served
    stream(listener, client.tokens[:2])
    (line,) = listener.timelines.recent
    assert len(line.tokens) == len(client.tokens) - 2 and min(line.tokens) > 0


def test_chunks_are_those_of_other_clients(served: tuple[Listener, ScriptedClient]) -> None:
    """Comments apart, and what `resume` names."""
    listener, _ = served
    followed = Follower([]).feed(stream(listener, []).encode()).decode()
    plain = stream(listener, None)
    (theirs,) = {json.loads(x[6:])["id"] for x in plain.split("\n\n") if x.startswith("data: {")}
    (when,) = {json.loads(x[6:])["created"] for x in plain.split("\n\n") if x.startswith("data: {")}
    assert plain.replace(theirs, "cmpl-1").replace(str(when), "5") == followed


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"n": 2}, "resume takes one choice, without echo and beam search"),
        ({"echo": True}, "resume takes one choice, without echo and beam search"),
        ({"stream": False}, "resume needs stream"),
        ({"resume": STATE | {"tokens": [1 << 30]}}, "resume holds a token outside 0 to "),
        (
            {"resume": STATE | {"tokens": [5] * 16}},
            "resume holds 16 tokens; the reply has 16 at most",
        ),
        ({"resume": STATE | {"id": "a\nb"}}, "resume.id: "),
    ],
)
def test_what_cannot_go_on_is_refused(
    served: tuple[Listener, ScriptedClient], change: dict[str, Any], fault: str
) -> None:
    listener, _ = served
    body = {"prompt": "hi", "stream": True, "resume": STATE} | change
    status, reply = listener.json("/v1/completions", body)
    assert (status, reply["error"]["message"].startswith(fault)) == (400, True), reply


def test_a_follower_passes_on_what_it_can() -> None:
    follower = Follower([])
    assert follower.feed(b": waiting\n\n") == b": waiting\n\n"
    assert follower.feed(b"data: a\n\n") == b""
    assert follower.feed(b": waiting\n\n: tok") == b""  # in the order in which it came
    assert follower.feed(b"ens [1,2]\n\ndata: b\n\n") == b"data: a\n\n: waiting\n\n"
    assert follower.tokens == [1, 2] and follower.spent is None
    end = b"data: [DONE]\n\n" + ended(Spent(3, 4))
    assert follower.feed(told([3]) + end) == b"data: b\n\ndata: [DONE]\n\n"
    assert follower.tokens == [1, 2, 3] and follower.spent == Spent(3, 4)


def test_a_follower_passes_on_what_came_before_nonsense() -> None:
    follower = Follower([])
    assert (
        follower.feed(b"data: a\n\n" + told([1]) + b"data: b\n\n: tokens [2,\n\n") == b"data: a\n\n"
    )
    assert follower.tokens == [1]
    with pytest.raises(msgspec.MsgspecError):
        follower.feed(b"x")


def test_a_body_that_asks() -> None:
    asked = asking(b' {"model":"m"}', Resume(id="a", created=1, seed=2, tokens=[3]))
    assert json.loads(asked) == {
        "model": "m", "resume": {"id": "a", "created": 1, "seed": 2, "tokens": [3]},
    }  # fmt: skip
