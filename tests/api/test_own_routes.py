"""docs/api.md says what the server's own routes take; this sends each cell."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import pytest
from gguf import GGMLQuantizationType
from websockets.sync.client import connect

from octavo.server.dialect import BodyRoute
from octavo.server.dialects import DIALECTS
from octavo.server.sockets import SocketMessage
from tests.api.server import Server, serving
from tests.parity.test_lora import make_adapter
from tests.small_models import Small, save_gguf

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
ADMIN = {"Authorization": "Bearer root"}
# What a request has beside the field of a row.
BESIDE: dict[str, dict[str, Any]] = {
    "/v1/load_lora_adapter": {"lora_path": "first"},
    "/v1/profile": {"seconds": 0.1},
    "/v1/replicas/drain": {"replica": "1"},
    "/v1/replicas/resume": {"replica": "1"},
    "/v1/replicas/restart": {"replica": "1"},
    "/v1/models/load": {"model": "m"},
    "/v1/batches": {
        "input_file_id": "FILE", "endpoint": "/v1/completions", "completion_window": "24h",
    },
    "/v1/files": {"file": json.dumps(LINE), "purpose": "batch"},
    "/v1/ws": {"id": "a", "path": "/v1/completions", "body": LINE["body"]},
}  # fmt: skip


class Row(NamedTuple):
    method: str
    path: str
    field: str
    taken: Any
    refused: str


def rows() -> list[Row]:
    cell = r"`([^`]+)`"
    pattern = rf"\| `(GET|POST|WS) (/\S+)` \| {cell} \| {cell} \| (?:`(.+?)` )?\|"
    found = re.findall(pattern, PAGE.read_text())
    return [Row(m, path, field, json.loads(taken), no) for m, path, field, taken, no in found]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("own")
    save_gguf(Small(), folder / "m.gguf", GGMLQuantizationType.Q8_0)
    (folder / "template").write_text("{{ messages[0].content }}")
    make_adapter(folder / "adapters" / "first", 1, modules={"self_attn.q_proj": (64, 64)})
    options = (
        "--memory", "600MiB", "--context", "64", "--replicas", "2", "--admin-key", "root",
        "--keys", str(folder / "keys"), "--data-dir", str(folder / "data"),
        "--lora-dir", str(folder / "adapters"), "--lora-memory", "8MiB",
        "--chat-template", str(folder / "template"),
    )  # fmt: skip
    with serving(str(folder / "m.gguf"), *options, log=folder / "log") as one:
        one.headers = ADMIN
        yield one


def said(server: Server, *messages: Any) -> list[Any]:
    """What comes from a socket until the first answer has ended."""
    url, out = f"ws://127.0.0.1:{server.port}/v1/ws", list[Any]()
    with connect(url, additional_headers=ADMIN, proxy=None) as socket:
        for message in messages:
            socket.send(json.dumps(message))
        while not out or not {"done", "cancelled"} & out[-1].keys() and out[-1]["status"] == 200:
            out.append(json.loads(socket.recv(20)))
    return out


def send(server: Server, method: str, path: str, values: dict[str, Any]) -> tuple[int, str]:
    if method == "WS":
        begun = [BESIDE[path]] if values.get("cancel") is True else []
        told = said(server, *begun, values)
        return told[0].get("status", 200), json.dumps(told[0].get("body"))
    if method == "GET":
        return server.call(method, f"{path}?{urlencode(values)}", None, ADMIN)
    if path != "/v1/files":
        return server.call(method, path, json.dumps(values).encode(), ADMIN)
    named = {"file": '; filename="a"'}
    parts = "".join(
        f'--X\r\nContent-Disposition: form-data; name="{name}"{named.get(name, "")}\r\n\r\n{value}\r\n'
        for name, value in values.items()
        if value is not None
    )
    form = {"Content-Type": "multipart/form-data; boundary=X"}
    return server.call(method, path, f"{parts}--X--\r\n".encode(), ADMIN | form)


def test_each_field_is_taken_and_refused(server: Server) -> None:
    ids = {"FILE": json.loads(send(server, "POST", "/v1/files", BESIDE["/v1/files"])[1])["id"]}
    batch = BESIDE["/v1/batches"] | {"input_file_id": ids["FILE"]}
    ids["BATCH"] = json.loads(send(server, "POST", "/v1/batches", batch)[1])["id"]
    asked = {"input": "a", "max_output_tokens": 1}
    made = json.loads(send(server, "POST", "/v1/responses", asked)[1])["id"]
    listed = server.get(f"/v1/responses/{made}/input_items")[1]
    ids["ITEM"] = json.loads(listed)["data"][0]["id"]

    def ask(row: Row, value: Any) -> tuple[int, str]:
        values = dict(BESIDE.get(row.path, {})) if row.method != "GET" else {}
        if row.path == "/v1/load_lora_adapter":
            values["lora_name"] = f"{row.field}-{len(value)}"  # not one that is taken
        values[row.field] = value
        filled = {k: ids.get(v, v) if isinstance(v, str) else v for k, v in values.items()}
        return send(server, row.method, row.path.replace("{id}", made), filled)

    for row in rows():
        status, text = ask(row, row.taken)
        assert status == 200, (row, text)
    for row in filter(lambda row: row.refused, rows()):
        status, text = ask(row, json.loads(row.refused))
        told = json.loads(text)["error"]
        assert 400 <= status < 500 and row.field in f"{told['message']} {told.get('param')}", (
            row,
            told,
        )


def test_every_field_has_a_row(server: Server) -> None:
    described = json.loads(server.get("/openapi.json")[1])
    schemas = described["components"]["schemas"]
    found = set()
    spoken = {r.path for d in DIALECTS for r in d.routes if isinstance(r, BodyRoute)}
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            fields = [p["name"] for p in operation.get("parameters", []) if p["in"] == "query"]
            for media in operation.get("requestBody", {}).get("content", {}).values():
                schema = media["schema"]
                fields += schemas.get(schema.get("$ref", "").rpartition("/")[2], schema)[
                    "properties"
                ]
            found |= {(method.upper(), path, field) for field in fields if path not in spoken}
    found |= {("WS", "/v1/ws", field) for field in SocketMessage.__struct_fields__}
    assert found == {(row.method, row.path, row.field) for row in rows()}


def test_each_header_is_taken_and_refused(server: Server) -> None:
    text = PAGE.read_text().partition("## Which headers may")[2].partition("\n## ")[0]
    found = re.findall(r"\| `([\w-]+)` \| `([^`]+)` \| (?:`(.+?)` )?\|", text)
    assert len(found) == 9
    for name, taken, refused in found:
        keys = {} if name in ("Authorization", "x-api-key") else ADMIN
        body = json.dumps(LINE["body"]).encode()
        assert server.call("POST", "/v1/completions", body, keys | {name: taken})[0] == 200
        if refused:
            status, reply = server.post("/v1/completions", body, keys | {name: refused})
            told = reply["error"]
            wrong = (401, "invalid_api_key") if not keys else (400, name.lower())
            assert (status, told["param"] or told["code"]) == wrong


def test_every_field_of_what_a_socket_says(server: Server) -> None:
    """Each comes, with a value like the example's, and no other."""
    text = PAGE.read_text().partition("## WebSocket\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"\| `(\w+)` \| `([^`]+)` \|", text))
    whole, stream = BESIDE["/v1/ws"], {"prompt": "a", "stream": True}
    came = [*said(server, whole), *said(server, whole | {"body": stream})]
    came += [*said(server, whole, {"id": "a", "cancel": True}), *said(server, [])]
    assert {name for one in came for name in one} == rows.keys()
    for name, example in rows.items():
        kinds = {type(one[name]) for one in came if name in one}
        assert type(json.loads(example)) in kinds and (len(kinds) == 1 or name == "id")
    assert came[-1]["id"] is None and came[-1]["status"] == 400


def test_a_form_of_too_many_fields_is_refused(server: Server) -> None:
    field = '--X\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    form = {"Content-Type": "multipart/form-data; boundary=X"}
    status, text = server.call("POST", "/v1/files", f"{field * 6}--X--\r\n".encode(), ADMIN | form)[
        :2
    ]
    assert status == 400 and "no multipart form" in text
