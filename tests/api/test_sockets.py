"""/v1/ws on a real server: answers, streams, several at once, ends."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from octavo.server.most_tokens import MOST_TOKENS
from octavo.server.sender import SENDER
from octavo.server.sockets import FOR_ALL
from tests.api.server import Server, serving

CHAT = {
    "messages": [{"role": "user", "content": "Tell me a story about a king."}],
    "temperature": 0, "max_tokens": 12,
}  # fmt: skip
KEY = {"Authorization": "Bearer key"}


@pytest.fixture(scope="module")
def server(smollm2: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log: Path = tmp_path_factory.mktemp("sockets") / "log"
    with serving("smollm2", "--offline", "--api-key", "key", log=log) as s:
        s.headers = KEY
        yield s


def opened(server: Server, **headers: str) -> ClientConnection:
    url = f"ws://127.0.0.1:{server.port}/v1/ws"
    return connect(url, additional_headers=KEY | headers, proxy=None)


def ask(socket: ClientConnection, id: str, path: str, body: Any) -> None:
    socket.send(json.dumps({"id": id, "path": path, "body": body}))


def told(socket: ClientConnection, *ids: str) -> dict[str, list[Any]]:
    """The messages about some requests until all of them are over."""
    out: dict[str, list[Any]] = defaultdict(list)
    open_ids = set(ids)
    while open_ids:
        message = json.loads(socket.recv(20))
        out[message.pop("id")].append(message)
        open_ids -= {id for id in ids if out[id][-1:] in ([{"done": True}], [{"cancelled": True}])}
    return out


def test_every_dialect(server: Server) -> None:
    """Whole and as a stream, a request says the same as over HTTP."""
    status, expected = server.post("/v1/chat/completions", CHAT, KEY)
    text = expected["choices"][0]["message"]["content"]
    greedy = {"temperature": 0, "num_predict": 12}
    with opened(server) as socket:
        ask(socket, "a", "/v1/chat/completions", CHAT)
        ask(socket, "b", "/v1/chat/completions", CHAT | {"stream": True})
        ask(socket, "c", "/v1/messages", CHAT | {"stream": True})
        ask(socket, "d", "/api/chat", {"messages": CHAT["messages"], "options": greedy})
        ask(socket, "e", "/v1/embeddings", {"input": "a king"})
        said = told(socket, "a", "b", "c", "d", "e")
    (whole, _), stream = said["a"], said["b"][:-1]
    assert (status, whole["status"]) == (200, 200)
    assert whole["body"]["choices"][0]["message"]["content"] == text
    deltas = [m["chunk"]["choices"][0]["delta"] for m in stream]
    assert "".join(d.get("content", "") for d in deltas) == text
    events = [m["chunk"] for m in said["c"][:-1]]
    assert (
        "".join(
            e["delta"].get("text", "")
            for e in events
            if e["type"].endswith("_delta") and e["type"] != "message_delta"
        )
        == text
    )
    assert "".join(m["chunk"]["message"]["content"] for m in said["d"][:-1]) == text
    assert len(said["e"][0]["body"]["data"][0]["embedding"]) == 576
    server.wait_idle()


def test_cancelling_and_leaving(server: Server) -> None:
    long = CHAT | {"stream": True, "max_tokens": 4000, "ignore_eos": True}
    with opened(server) as socket:
        ask(socket, "a", "/v1/chat/completions", long)
        assert "chunk" in json.loads(socket.recv(20))
        socket.send(json.dumps({"id": "a", "cancel": True}))
        assert told(socket, "a")["a"][-1] == {"cancelled": True}
        server.wait_idle()
        ask(socket, "w", "/v1/chat/completions", long | {"stream": False})
        while not server.metric("octavo_requests_running"):
            pass
        socket.send(json.dumps({"id": "w", "cancel": True}))
        assert told(socket, "w")["w"] == [{"cancelled": True}]
        socket.send(json.dumps({"id": "never", "cancel": True}))
        ask(socket, "a", "/v1/chat/completions", CHAT)  # the id is free again
        assert told(socket, "a")["a"][0]["status"] == 200
        ask(socket, "b", "/v1/chat/completions", long)
        assert json.loads(socket.recv(20))["id"] == "b"
    server.wait_idle()


def test_what_is_wrong(server: Server) -> None:
    with opened(server) as socket:
        for text, id, status, param in (
            ("[]", None, 400, None), ("{", None, 400, None), (50_000 * '{"id":', None, 400, None), ('{"id": ""}', None, 400, "id"),
            ('{"id": "a", "path": "v1"}', None, 400, "path"),
            ('{"id": "a", "path": "/nowhere", "body": {}}', "a", 404, None),
            ('{"id": "a", "path": "/v1/chat/completions", "body": {"messages": []}}', "a", 400, "messages"),
            ('{"id": "a", "path": "/v1/chat/completions"}', "a", 400, None),
        ):  # fmt: skip
            socket.send(text)
            said = json.loads(socket.recv(20))
            assert (said["id"], said["status"], said["body"]["error"]["param"]) == (
                id,
                status,
                param,
            )
            if id is not None:
                assert json.loads(socket.recv(20)) == {"id": id, "done": True}
        ask(socket, "a", "/v1/chat/completions", CHAT | {"max_tokens": 400, "ignore_eos": True})
        ask(socket, "a", "/v1/chat/completions", CHAT)
        assert json.loads(socket.recv(20))["body"]["error"]["param"] == "id"
        for i in range(64):
            ask(
                socket,
                str(i),
                "/v1/chat/completions",
                CHAT | {"max_tokens": 400, "ignore_eos": True},
            )
        assert json.loads(socket.recv(60))["body"]["error"]["code"] == "overloaded"
    server.wait_idle()


def test_headers_are_those_of_each_request(server: Server) -> None:
    with opened(server, **{"x-slo-ttft-ms": "soon"}) as socket:
        for id in "ab":
            ask(socket, id, "/v1/chat/completions", CHAT)
            (said, _) = told(socket, id)[id]
            assert (said["status"], said["body"]["error"]["param"]) == (400, "x-slo-ttft-ms")
    assert {header.decode() for header in FOR_ALL} > {SENDER, MOST_TOKENS}


def test_who_may_open_one(server: Server) -> None:
    for headers, status in (
        ({"Authorization": "Bearer no"}, 401), ({"Origin": "https://elsewhere.example"}, 403),
    ):  # fmt: skip
        with pytest.raises(InvalidStatus) as refused:
            opened(server, **headers)
        assert refused.value.response.status_code == status
    assert server.get("/v1/models", KEY)[0] == 200
