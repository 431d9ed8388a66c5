"""Limits of tokens that keys of a gateway have, before Octavo's servers and others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from octavo.server.keys import Key, KeyLimits, KeyStore
from tests.api.server import Server, serving
from tests.small_models import Small, save_gguf

LIMIT = 300
PART = 6  # tokens of a character that is not whole yet, of each of two choices
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("limits")
    save_gguf(Small(), folder / "m.gguf", GGMLQuantizationType.Q8_0)
    model = (str(folder / "m.gguf"), "--memory", "150MiB")
    with serving(*model, log=folder / "engine.log") as server:
        yield server


@contextmanager
def limited(engine: Server, folder: Path, **limits: int) -> Iterator[tuple[Server, dict[str, str]]]:
    """A gateway, and the key of somebody with limits."""
    path = str(folder / "keys.db")
    with closing(KeyStore(path)) as store:
        secret = store.create(Key("ann", limits=KeyLimits(**limits)))
    words = ("--upstream", engine.url, "--keys", path)
    with serving(*words, log=folder / "gateway.log", does="gateway") as gateway:
        yield gateway, {"Authorization": f"Bearer {secret}"}


def spent(reply: dict[str, Any]) -> int:
    usage = reply["usage"]
    return int(usage["total_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])


ENDLESS = {"model": "m", "prompt": PROMPT, "ignore_eos": True}


@pytest.mark.parametrize("fields", [{}, {"n": 2}])
def test_a_text_ends_where_the_tokens_of_its_key_do(
    engine: Server, tmp_path: Path, fields: dict[str, int]
) -> None:
    with limited(engine, tmp_path, tokens_per_minute=LIMIT) as (gateway, key):
        body = ENDLESS | {"max_tokens": 1000} | fields
        status, reply = gateway.post("/v1/completions", body, key)
        assert status == 200 and reply["choices"][0]["finish_reason"] == "length"
        assert LIMIT <= spent(reply) <= LIMIT + PART
        assert gateway.post("/v1/completions", body, key)[0] == 429


@pytest.mark.parametrize(
    ("prompt", "more", "total"),
    [("There was a king", {}, 153), ("A king there was", {"concurrent": 1}, LIMIT)],
)
def test_a_text_that_names_no_limit_leaves_half_for_others_if_there_can_be_any(
    engine: Server, tmp_path: Path, prompt: str, more: dict[str, int], total: int
) -> None:
    """The prompt is taken for 5 tokens: half of the 295 others are 148."""
    with limited(engine, tmp_path, tokens_per_minute=LIMIT, **more) as (gateway, key):
        body = {"prompt": prompt, "ignore_eos": True}
        status, reply = gateway.post("/completion", body, key)
        assert status == 200 and reply["stop_type"] == "limit"
        took = reply["tokens_evaluated"] + reply["tokens_predicted"]
        assert total <= took <= total + PART
        assert gateway.post("/completion", body, key)[0] == (429 if more else 200)


def test_a_stream_ends_there_too(engine: Server, tmp_path: Path) -> None:
    with limited(engine, tmp_path, tokens_per_day=LIMIT) as (gateway, key):
        body = ENDLESS | {"max_tokens": 1000, "stream": True}
        body["stream_options"] = {"include_usage": True}
        data = json.dumps(body).encode()
        status, text = gateway.call("POST", "/v1/completions", data, key)
        events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
        assert status == 200 and LIMIT <= spent(events[-1]) <= LIMIT + PART
        assert events[-2]["choices"][0]["finish_reason"] == "length"


def test_what_a_key_has_is_asked_for_as_it_is(engine: Server, tmp_path: Path) -> None:
    """The prompt is longer than it looks, which is no reason to cut the text."""
    with limited(engine, tmp_path, tokens_per_minute=LIMIT) as (gateway, key):
        reply = gateway.post("/v1/completions", ENDLESS | {"max_tokens": 40}, key)[1]
        assert reply["usage"]["completion_tokens"] == 40
        assert len(gateway.post("/v1/completions", ENDLESS, key)[1]["choices"][0]["text"]) > 0
