"""docs/decoding.md says what becomes of every field of a request; this checks each row."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from octavo.server.dialects.openai.schemas import FIELDS, ChatBody, CompletionBody
from tests.api.effects import EFFECTS, TEMPLATE, Asking
from tests.api.server import Server, serving

PAGE = Path(__file__).parents[2] / "docs" / "decoding.md"
ROUTES = {"chat": ("/v1/chat/completions", ChatBody), "text": ("/v1/completions", CompletionBody)}
GIVEN = {"model", "messages", "prompt"}


class Row(NamedTuple):
    field: str
    where: str
    values: dict[str, Any]
    meaning: str


def rows() -> list[Row]:
    text = PAGE.read_text().split("## Fields of a request")[1].split("\n## ")[0]
    out = []
    for line in text.splitlines():
        match = re.fullmatch(
            r"\| `(\w+)` \| (chat|text|both) \| `(.+?)`(?: with `(.+?)`)? \| (.+) \|", line
        )
        if match:
            field, where, example, others, meaning = match.groups()
            values = {field: json.loads(example)} | json.loads("{" + (others or "") + "}")
            places = ("chat", "text") if where == "both" else (where,)
            out += [Row(field, place, values, meaning) for place in places]
    return out


def name(row: Row) -> str:
    return f"{row.where}-{row.field}"


def test_every_field_has_a_row() -> None:
    for place, (_, body) in ROUTES.items():
        listed = {r.field for r in rows() if r.where == place}
        assert set(body.__struct_fields__) - GIVEN <= listed
        assert FIELDS.ignored <= listed
    assert set(FIELDS.unsupported) - {"moderation"} <= {r.field for r in rows()}
    assert len(rows()) > 80


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model with a small cache and a template that shows what it is given."""
    folder = tmp_path_factory.mktemp("table")
    (folder / "template.jinja").write_text(TEMPLATE)
    options = ("--memory", "290MiB", "--context", "640", "--offline")
    template = str(folder / "template.jinja")
    with serving("smollm2", *options, "--chat-template", template, log=folder / "log") as s:
        yield s


def example(row: Row) -> tuple[str, dict[str, Any]]:
    route, _ = ROUTES[row.where]
    body: dict[str, Any] = {"model": "smollm2", "max_tokens": 4, "timeout": 60, "seed": 5}
    if "max_completion_tokens" in row.values:
        del body["max_tokens"]
    if row.where == "chat":
        body["messages"] = [{"role": "user", "content": "hi"}]
    else:
        body["prompt"] = "hi"
    return route, body


def test_every_row_says_what_becomes_of_it() -> None:
    for row in rows():
        assert row.meaning.startswith(("honoured", "taken without effect", "refused"))
    assert set(EFFECTS) == {r.field for r in rows() if r.meaning.startswith("honoured")}


@pytest.mark.parametrize(
    "row", [r for r in rows() if not r.meaning.startswith("refused")], ids=name
)
def test_the_example_is_taken(server: Server, row: Row) -> None:
    route, body = example(row)
    status, text = server.call("POST", route, json.dumps(body | row.values).encode())
    assert status == 200, text


@pytest.mark.parametrize("row", [r for r in rows() if r.meaning.startswith("honoured")], ids=name)
def test_it_has_its_effect(server: Server, row: Row) -> None:
    EFFECTS[row.field](Asking(server, row.where))


@pytest.mark.parametrize(
    "row", [r for r in rows() if r.meaning.startswith("taken without")], ids=name
)
def test_it_has_no_effect(server: Server, row: Row) -> None:
    asking = Asking(server, row.where)
    assert asking.ids(**row.values) == asking.ids()


@pytest.mark.parametrize("row", [r for r in rows() if r.meaning.startswith("refused")], ids=name)
def test_it_is_refused(server: Server, row: Row) -> None:
    route, body = example(row)
    status, reply = server.post(route, body | row.values)
    assert (status, reply["error"]["param"]) == (400, row.field)
