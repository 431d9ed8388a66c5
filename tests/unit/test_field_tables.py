"""docs/api.md says what becomes of every field of a request; this sends each row."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import msgspec
import pytest

from octavo.checkpoint import open_checkpoint
from octavo.checkpoint.progress import ProgressBar
from octavo.server.dialect import BodyRoute
from octavo.server.dialects import DIALECTS, anthropic, llama_cpp, ollama, openai
from octavo.server.dialects.anthropic.schemas import OutputConfig
from octavo.server.dialects.ollama.schemas import Options
from octavo.text import Tokenizer, load_tokenizer
from tests.unit.dialects import TEMPLATE, filling, scripted, speaking
from tests.unit.fake_models import Listener, ScriptedClient

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
HI = [{"role": "user", "content": "hi"}]
# A body for each path, to which a row adds its example.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"model": "ann", "input": "hi"},
    "/v1/messages": {"model": "ann", "messages": HI, "max_tokens": 64},
    "/v1/messages/count_tokens": {"model": "ann", "messages": HI},
    "/api/chat": {"model": "ann", "messages": HI, "stream": False},
    "/api/generate": {"model": "ann", "prompt": "hi", "stream": False},
    "/api/embed": {"model": "ann", "input": "hi"},
    "/api/embeddings": {"model": "ann", "prompt": "hi"},
    "/api/show": {"model": "ann"},
    "/api/pull": {"model": "ann"},
    "/completion": {"model": "ann", "prompt": "hi"},
    "/infill": {"model": "ann", "input_prefix": "hi", "input_suffix": "ho"},
    "/apply-template": {"model": "ann", "messages": HI},
    "/v1/embeddings": {"model": "ann", "input": "hi"},
    "/v1/rerank": {"model": "ann", "query": "a b", "documents": ["a", "b c d"]},
    "/v1/score": {"model": "ann", "text_1": "a b", "text_2": "b c d"},
    "/tokenize": {"model": "ann", "prompt": "hi"},
    "/detokenize": {"model": "ann", "tokens": [100]},
}
ELSEWHERE = {"/v1/chat/completions", "/v1/completions"}  # in docs/decoding.md
VARIES = re.compile(
    r'"(?:created_at|(?:total|load|eval|prompt_eval)_duration)":[^,}]+|"created_at":\d+'
    r"|(?:msg|resp)_[0-9a-f]+|rerank-[0-9a-f]+"
    r'|"seed":\d+|"(?:prompt|predicted)_(?:ms|per_token_ms|per_second)":[^,}]+'
)
WORDS = ("honoured", "taken without effect", "refused")


class Row(NamedTuple):
    path: str
    field: str
    values: dict[str, Any]
    meaning: str


def rows() -> list[Row]:
    out = []
    for section in PAGE.read_text().split("### Fields of ")[1:]:
        path = section.split("`")[1]
        for line in section.split("\n#")[0].splitlines():
            match = re.fullmatch(r"\| `([\w.]+)` \| `(.+?)`(?: with `(.+?)`)? \| (.+) \|", line)
            if match:
                name, example, others, meaning = match.groups()
                values = {name: json.loads(example)} | json.loads("{" + (others or "") + "}")
                out.append(Row(path, name, values, meaning))
    same = [
        row for row in out if row.path == "/completion" and row.field not in ("model", "prompt")
    ]
    return out + [row._replace(path="/infill") for row in same]


def routes() -> list[BodyRoute]:
    return [
        route for dialect in DIALECTS for route in dialect.routes
        if isinstance(route, BodyRoute) and route.path not in ELSEWHERE
    ]  # fmt: skip


def test_every_field_has_a_row() -> None:
    listed: dict[str, set[str]] = {}
    for row in rows():
        assert row.meaning.startswith(WORDS)
        listed.setdefault(row.path, set()).add(row.field)
    assert listed.keys() == BODIES.keys() == {route.path for route in routes()}
    for route in routes():
        roots = {name.partition(".")[0] for name in listed[route.path]}
        assert roots >= set(route.body.__struct_fields__)
    assert {f"options.{name}" for name in Options.__struct_fields__} <= listed["/api/chat"]
    told = listed["/v1/messages"]
    assert {f"output_config.{name}" for name in get_type_hints(OutputConfig)} <= told
    for dialect in (openai.RESPONSES, anthropic.DIALECT, ollama.DIALECT, llama_cpp.DIALECT):
        paths = [route.path for route in dialect.routes if isinstance(route, BodyRoute)]
        assert dialect.fields.names <= set().union(*(listed[path] for path in paths))


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Listener]:
    known = filling(load_tokenizer(open_checkpoint(smollm2)))
    tokenizer = Tokenizer(known.backend, replace(known.special, add_bos=True))
    models = (
        scripted(tokenizer, "ann", "Once upon a time"),
        scripted(tokenizer, "bob", "No.", shows="Bob." + TEMPLATE),
    )
    with speaking(*models, fetch=pretend) as one:
        yield one


def pretend(name: str, progress: ProgressBar) -> None:
    """Fetches nothing."""
    with progress("Fetching", 10) as advance:
        advance(10)


def ask(server: Listener, path: str, values: dict[str, Any]) -> tuple[int, str, list[Any]]:
    """The status, the reply without what differs every time, and what the engines were told."""
    body = deepcopy(BODIES[path])
    for name, value in values.items():
        inner, _, key = name.rpartition(".")
        (body.setdefault(inner, {}) if inner else body)[key] = value
    if path == "/tokenize" and "messages" in values:
        del body["prompt"]
    clients = [entry.client for entry in server.models]
    told: list[Any] = []
    for client in clients:
        assert isinstance(client, ScriptedClient)
        client.requests.clear()
    status, text = server.ask(path, body)
    for number, client in enumerate(clients):
        assert isinstance(client, ScriptedClient)
        for request in client.requests:
            fields = msgspec.to_builtins(request)
            seeded = {"options.seed", "seed"} & values.keys()
            params = {k: v for k, v in fields["params"].items() if seeded or k != "seed"}
            told.append(fields | {"id": number, "group": "", "params": params})
    return status, VARIES.sub("", text), told


def name(row: Row) -> str:
    return f"{row.path}-{row.field}"


def those(word: str) -> list[Row]:
    return [row for row in rows() if row.meaning.startswith(word)]


@pytest.mark.parametrize("row", those("honoured"), ids=name)
def test_it_is_honoured(server: Listener, row: Row) -> None:
    others = {k: v for k, v in row.values.items() if k != row.field and v is not None}
    status, reply, told = ask(server, row.path, row.values)
    plain = ask(server, row.path, others)
    missing = row.field == "previous_response_id"
    assert (status, plain[0]) == (400 if missing else 200, 200), reply
    assert (reply, told) != plain[1:]


@pytest.mark.parametrize("row", those("taken without effect"), ids=name)
def test_it_has_no_effect(server: Listener, row: Row) -> None:
    others = {k: v for k, v in row.values.items() if k != row.field}
    with_it = ask(server, row.path, row.values)
    assert with_it[0] == 200
    assert with_it == ask(server, row.path, others)


@pytest.mark.parametrize("row", those("refused"), ids=name)
def test_it_is_refused(server: Listener, row: Row) -> None:
    status, reply, told = ask(server, row.path, row.values)
    error = json.loads(reply)["error"]
    message = error if isinstance(error, str) else error["message"]
    assert status == 400 and message.startswith(row.field) and not told
