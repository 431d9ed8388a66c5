"""What is asked of servers, in every dialect, for keys that have so many tokens left."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.balance.breaker import Breaker
from octavo.errors import InvalidValue
from octavo.gateway.answers import read_spent
from octavo.gateway.body import Relayed, read_outline
from octavo.gateway.config import Model
from octavo.gateway.job import RelayJob, reserve
from octavo.gateway.response_cache import key_of
from octavo.gateway.traffic import Dealt
from octavo.gateway.upstream import Place, Upstream
from octavo.generate.reply import Usage
from octavo.server.exchange import Exchange
from octavo.server.guard import Principal
from octavo.server.keys import Key, KeyLimits
from octavo.server.limits import Account
from octavo.server.most_tokens import MOST_TOKENS, read_most, within
from octavo.server.resume import Spent
from octavo.simulate.server import Simulated, SimulatedAnswer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "a" * 30}]  # with their JSON 63 bytes, or 16 tokens
LEFT = 300
PROMPT = {"prompt": "a" * 62}  # with its quotes 64 bytes, or 17 tokens


def reserved(path: str, body: dict[str, Any], headers: dict[str, str] | None = None, **limits: int) -> RelayJob:  # fmt: skip
    """A request of a key with limits, once its tokens are taken."""
    raw = json.dumps(body).encode()
    asked = Relayed(path, path, raw, read_outline(raw))
    job = RelayJob(asked, headers or {}, Dealt("m", Model()), Usage(), asked.resume())
    account = Account(Key("ann", limits=KeyLimits(**limits)))
    scope = {"principal": Principal(account=account), "exchange": Exchange()}
    asyncio.run(reserve(scope, job))
    return job


def sent(job: RelayJob, own: bool = False, context: int = 0) -> dict[str, Any]:
    """The body that a server is sent."""
    upstream = Upstream(Place("http://u"), Breaker(lambda: 0.0), own=own)
    upstream.contexts = {"m": context}
    job.lease = SimpleNamespace(upstream=upstream)  # type: ignore[assignment]
    found: dict[str, Any] = json.loads(job.body)
    return found


@pytest.mark.parametrize(
    ("path", "body", "changed"),
    [(CHAT, {"messages": MESSAGES, "max_tokens": 1000}, {"max_tokens": 284}),
     (CHAT, {"messages": MESSAGES, "max_completion_tokens": 1000}, {"max_completion_tokens": 284}),
     (CHAT, {"messages": MESSAGES, "max_tokens": 1000, "n": 2}, {"max_tokens": 142}),
     (CHAT, {"messages": MESSAGES, "max_tokens": None}, {"max_tokens": 142}),
     (CHAT, {"messages": MESSAGES, "n": 2}, {"max_tokens": 71}),
     (CHAT, {"messages": MESSAGES, "max_tokens": 284}, {}),
     (CHAT, {"messages": MESSAGES, "max_tokens": "many"}, {"max_tokens": 142}),
     (COMPLETIONS, PROMPT | {"max_tokens": 1000, "best_of": 3}, {"max_tokens": 94}),
     (COMPLETIONS, PROMPT, {"max_tokens": 16}),
     (COMPLETIONS, {"prompt": [[1, 2], [3]], "max_tokens": 1000}, {"max_tokens": 148}),
     (COMPLETIONS, {"prompt": [1, 2, 3, 4], "max_tokens": 1000}, {"max_tokens": 296}),
     ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1000}, {"max_tokens": 284}),
     ("/v1/responses", {"input": "a" * 62}, {"max_output_tokens": 142}),
     ("/v1/responses", {"input": "a" * 62, "max_output_tokens": 9}, {}),
     ("/api/chat", {"messages": MESSAGES}, {"options": {"num_predict": 142}}),
     ("/api/chat", {"messages": MESSAGES, "options": {"seed": 1, "num_predict": 0}},
      {"options": {"seed": 1, "num_predict": 142}}),
     ("/api/generate", PROMPT | {"options": None}, {"options": {"num_predict": 142}}),
     ("/completion", PROMPT | {"n_predict": -1}, {"n_predict": 142}),
     ("/completion", PROMPT | {"n_predict": 0}, {}),
     ("/v1/embeddings", {"input": "a" * 62}, {})],
)  # fmt: skip
def test_other_servers_are_asked_for_no_more_than_is_left(
    path: str, body: dict[str, Any], changed: dict[str, Any]
) -> None:
    given = {"model": "m", "x": {"y": [1.0, None]}} | body
    assert sent(reserved(path, given, tokens_per_minute=LEFT)) == given | changed


@pytest.mark.parametrize(
    ("day", "context", "most"), [(1000, 0, 492), (1_000_000, 0, 4096), (1_000_000, 2016, 1000)]
)
def test_an_open_text_is_given_no_more_than_a_context_has_room_for(
    day: int, context: int, most: int
) -> None:
    """Other servers refuse what is longer."""
    job = reserved(CHAT, {"model": "m", "messages": MESSAGES}, tokens_per_day=day)
    assert sent(job, context=context)["max_tokens"] == most


@pytest.mark.parametrize(
    ("body", "headers", "told"),
    [({"max_tokens": 1000}, {}, "300"), ({"max_tokens": 1000, "n": 2}, {}, "300"),
     ({}, {}, "158"), ({}, {MOST_TOKENS: "20"}, "20"), ({"max_tokens": 284}, {}, None)],
)  # fmt: skip
def test_octavos_servers_are_told_and_sent_what_the_client_sent(
    body: dict[str, Any], headers: dict[str, str], told: str | None
) -> None:
    """Where the key has as much as is named they are told nothing: the prompt may be longer than
    it looks."""
    given = {"model": "m", "messages": MESSAGES} | body
    job = reserved(CHAT, given, headers, tokens_per_minute=LEFT)
    assert sent(job, own=True) == given
    assert job.lease is not None and job.told(job.lease.upstream).get(MOST_TOKENS) == told


@pytest.mark.parametrize(
    ("path", "body", "limits", "changed"),
    [(CHAT, {"messages": MESSAGES, "max_tokens": 1000}, {}, {"max_tokens": 84}),
     (CHAT, {"messages": MESSAGES, "max_tokens": 84}, {}, {}),
     (CHAT, {"messages": MESSAGES}, {}, {"max_tokens": 84}),
     (CHAT, {"messages": MESSAGES, "max_tokens": 1000}, {"tokens_per_minute": 50}, {"max_tokens": 34}),
     (CHAT, {"messages": MESSAGES, "max_tokens": 1000}, {"tokens_per_minute": LEFT}, {"max_tokens": 84}),
     (COMPLETIONS, PROMPT, {}, {}), ("/v1/embeddings", {"input": "a" * 62}, {}, {})],
)  # fmt: skip
def test_what_a_gateway_before_this_one_says_binds_other_servers_too(
    path: str, body: dict[str, Any], limits: dict[str, int], changed: dict[str, Any]
) -> None:
    given = {"model": "m"} | body
    assert sent(reserved(path, given, {MOST_TOKENS: "100"}, **limits)) == given | changed


def test_simulated_servers_do_as_they_are_told() -> None:
    body = {"prompt": "a" * 62, "max_tokens": 100}
    for within_tokens, tokens in ((None, 100), (200, 100), (50, 33), (2, 1)):
        assert SimulatedAnswer(Simulated(), False, body, within_tokens).tokens == tokens


def test_nothing_is_written_for_keys_without_such_limits() -> None:
    body = {"model": "m", "messages": MESSAGES, "temperature": 0}
    job = reserved(CHAT, body, requests_per_minute=9, concurrent=2)
    given = job.asked.body
    sent(job)
    assert job.limit is None and job.body is given and key_of(job) is not None


def test_what_a_limit_may_cut_is_not_kept() -> None:
    body = {"model": "m", "messages": MESSAGES, "temperature": 0}
    assert key_of(reserved(CHAT, body, tokens_per_minute=LEFT)) is None
    named = reserved(CHAT, body | {"max_tokens": 20}, tokens_per_minute=LEFT)
    assert key_of(named) is not None


def test_the_last_that_may_run_gets_all() -> None:
    account = Account(Key("ann", limits=KeyLimits(tokens_per_minute=LEFT, concurrent=2)))
    account.begin()
    assert account.share(20) == 140
    account.begin()
    assert account.share(20) == 280
    assert account.share(LEFT) == 1


@pytest.mark.parametrize(
    "answer",
    [{"usage": {"prompt_tokens": 5, "completion_tokens": 7}},
     {"usage": {"input_tokens": 5, "output_tokens": 7}},
     {"tokens_evaluated": 5, "tokens_predicted": 7}, {"prompt_eval_count": 5, "eval_count": 7}],
)  # fmt: skip
def test_answers_of_every_dialect_count(answer: dict[str, Any]) -> None:
    assert read_spent(json.dumps({"x": 1} | answer).encode(), "u") == Spent(5, 7)


@pytest.mark.parametrize("text", ["0", "-1", "x", "1.0", "", "9" * 16, "²"])
def test_what_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue, match=MOST_TOKENS):
        read_most({MOST_TOKENS: text})


def test_the_nearer_bound_holds() -> None:
    assert within(None, None) is None and read_most({}) is None
    for most, own, last in ((5, 9, 4), (9, 5, 4)):
        covers = within(most, lambda used, own=own: used < own)  # type: ignore[misc]
        assert covers is not None and covers(last) and not covers(last + 1)
