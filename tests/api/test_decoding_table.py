"""docs/decoding.md says what becomes of every field; this sends each row's example."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from octavo.server.dialects.openai.schemas import FIELDS, ChatBody, CompletionBody
from tests.api.server import Server

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


def test_every_field_has_a_row() -> None:
    for place, (_, body) in ROUTES.items():
        listed = {r.field for r in rows() if r.where == place}
        assert set(body.__struct_fields__) - GIVEN <= listed
        assert FIELDS.ignored <= listed
    assert set(FIELDS.unsupported) - {"moderation"} <= {r.field for r in rows()}
    assert len(rows()) > 80


@pytest.mark.parametrize("row", rows(), ids=lambda r: f"{r.where}-{r.field}")
def test_row(server: Server, row: Row) -> None:
    route, _ = ROUTES[row.where]
    body: dict[str, Any] = {"model": "smollm2", "max_tokens": 4, "timeout": 60}
    if "max_completion_tokens" in row.values:
        del body["max_tokens"]
    if row.where == "chat":
        body["messages"] = [{"role": "user", "content": "hi"}]
    else:
        body["prompt"] = "hi"
    status, text = server.call("POST", route, json.dumps(body | row.values).encode())
    if row.meaning.startswith("refused"):
        assert status == 400 and json.loads(text)["error"]["param"] == row.field
    else:
        assert status == 200, text
        assert row.meaning.startswith(("honoured", "taken without effect"))
