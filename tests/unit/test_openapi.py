"""The OpenAPI document: it lists every route and field. That a server does as it says is what
`.ci/conformance` asks."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from octavo.checkpoint import open_checkpoint
from octavo.engine.request import POSITIVE, RANGES
from octavo.errors import InvalidValue
from octavo.server.dialect import BodyRoute
from octavo.server.dialects import DIALECTS
from octavo.server.guard import Access
from octavo.server.openapi import document
from octavo.server.paging import page
from octavo.text import load_tokenizer
from tests.unit.dialects import scripted, speaking
from tests.unit.fake_models import Listener
from tests.unit.test_field_tables import BODIES, rows


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Listener]:
    tokenizer = load_tokenizer(open_checkpoint(smollm2))
    with speaking(scripted(tokenizer, "ann", "Once upon", context=512)) as one:
        yield one


@pytest.fixture(scope="module")
def described() -> Any:
    return json.loads(document(DIALECTS))


def test_it_lists_every_route(described: Any) -> None:
    paths = {
        re.sub(r":path(?=\})", "", route.path) for dialect in DIALECTS for route in dialect.routes
    }
    assert paths <= described["paths"].keys()
    ids = [op["operationId"] for methods in described["paths"].values() for op in methods.values()]
    assert len(ids) == len(set(ids))


def test_it_lists_what_belongs_to_no_dialect(server: Listener) -> None:
    _, described = server.json("/openapi.json")
    for path, method in (
        ("/v1/requests/{id}/cancel", "post"), ("/v1/usage", "get"), ("/health", "get"),
        ("/v1/models/load", "post"), ("/v1/models/unload", "post"),
        ("/v1/load_lora_adapter", "post"), ("/v1/unload_lora_adapter", "post"),
    ):  # fmt: skip
        assert method in described["paths"][path]
    body = described["paths"]["/v1/models/load"]["post"]["requestBody"]["content"]
    name = body["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert described["components"]["schemas"][name]["properties"].keys() == {"model", "pinned"}


def test_it_names_every_field(described: Any) -> None:
    schemas = described["components"]["schemas"]
    for dialect in DIALECTS:
        for route in dialect.routes:
            if isinstance(route, BodyRoute):
                body = described["paths"][route.path]["post"]["requestBody"]["content"]
                name = body["application/json"]["schema"]["$ref"].rpartition("/")[2]
                fields = {f.encode_name for f in msgspec.structs.fields(route.body)}
                assert schemas[name]["properties"].keys() == fields | dialect.fields.names


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.path}-{row.field}")
def test_it_knows_what_is_taken(described: Any, row: Any) -> None:
    """The examples of docs/api.md that are taken are valid, those that are refused are not."""
    body: dict[str, Any] = dict(BODIES[row.path])
    for name, value in row.values.items():
        inner, _, key = name.rpartition(".")
        body |= {inner: {**body.get(inner, {}), key: value}} if inner else {key: value}
    content = described["paths"][row.path]["post"]["requestBody"]["content"]
    schema = content["application/json"]["schema"] | {"components": described["components"]}
    valid = jsonschema.Draft202012Validator(schema).is_valid(body)
    depends = row.meaning.startswith("refused where")  # on the model
    assert valid == (depends or not row.meaning.startswith("refused"))


def test_its_pages_need_no_key_and_no_other_host(smollm2: Path) -> None:
    tokenizer = load_tokenizer(open_checkpoint(smollm2))
    model = scripted(tokenizer, "ann", "Once")
    with speaking(model, access=Access(api_keys=("key",))) as one:
        assert one.json("/openapi.json")[1]["openapi"] == "3.1.0"
        status, page = one.ask("/docs")
    assert status == 200 and not re.search(r"https?:|src=|url\(|@import|fetch\(\"/", page)


def test_a_path_tells_its_methods(server: Listener) -> None:
    """Those of all its operations, when it is asked with another."""
    _, described = server.json("/openapi.json")
    paths = ("/props", "/v1/responses/{id}", "/v1/usage", "/v1/models/load")
    for path in paths:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("PATCH", path.replace("{id}", "x"))
        response = connection.getresponse()
        response.read()
        connection.close()
        allowed = set(response.headers["allow"].lower().split(", "))
        assert response.status == 405 and allowed - {"head"} == described["paths"][path].keys()


def test_lists_take_what_is_described(described: Any) -> None:
    """Of one more and one less than may be asked, too."""
    items = described["paths"]["/v1/responses/{id}/input_items"]["get"]["parameters"]
    told = {one["name"]: one["schema"] for one in items if one["in"] == "query"}
    assert told.keys() == {"limit", "order", "after"}

    def taken(limit: int) -> bool:
        try:
            page([], {"limit": str(limit)})
        except InvalidValue:
            return False
        return True

    valid = jsonschema.Draft202012Validator(told["limit"]).is_valid
    limits = (0, 1, 100, 101)
    assert [*map(taken, limits)] == [*map(valid, limits)] == [False, True, True, False]


PLAIN = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    **BODIES,
}


def numbers(described: Any, path: str) -> dict[str, tuple[float, float]]:
    """Fields of a body that are numbers with bounds: a step below and one above."""
    body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    name = body["schema"]["$ref"].rpartition("/")[2]
    found = {}
    for field, schema in described["components"]["schemas"][name]["properties"].items():
        if "maximum" in schema and "anyOf" in schema:
            low = schema.get("minimum", schema.get("exclusiveMinimum"))
            step = 0.001 if {"type": "number"} in schema["anyOf"] else 1
            found[field] = (low - step, schema["maximum"] + step)
    return found


def test_numbers_have_bounds(described: Any) -> None:
    chat = numbers(described, "/v1/chat/completions")
    assert set(RANGES) - {"logprobs", "seed"} < chat.keys()  # every seed is taken
    assert all({"temperature", "top_p"} <= numbers(described, p).keys() for p in (
        "/v1/completions", "/v1/responses", "/v1/messages", "/completion", "/infill",
    ))  # fmt: skip


@pytest.mark.parametrize("field", sorted(RANGES.keys() - {"seed"}))
def test_bounds_are_those_that_are_checked(described: Any, field: str) -> None:
    kind, low, high = RANGES[field]
    step = 0.001 if kind is float else 1
    assert numbers(described, "/v1/completions")[field] == (low - step, high + step)


@pytest.mark.parametrize("path", PLAIN)
def test_numbers_outside_their_bounds_are_refused(
    server: Listener, described: Any, path: str
) -> None:
    needs: dict[str, dict[str, Any]] = {
        "beam_width": {"use_beam_search": True}, "length_penalty": {"use_beam_search": True},
    }  # fmt: skip
    if path == "/v1/chat/completions":
        needs["top_logprobs"] = {"logprobs": True}
    for field, (below, above) in numbers(described, path).items():
        for value in (below,) if field.startswith("max_") else (below, above):  # the context's
            body = {**PLAIN[path], **needs.get(field, {}), field: value}
            status, reply = server.json(path, body)
            assert (status, reply["error"].get("param", field)) == (400, field)


@pytest.mark.parametrize("field", sorted(RANGES.keys() - {"max_tokens", "min_tokens", "logprobs"}))
def test_numbers_at_their_bounds_are_taken(server: Listener, field: str) -> None:
    _, low, high = RANGES[field]
    for value in (low + 1e-9 if field in POSITIVE else low, high):
        body = {**PLAIN["/v1/completions"], field: value}
        assert server.json("/v1/completions", body)[0] == 200
