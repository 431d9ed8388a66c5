"""What a gateway keeps, or finds again: responses, files, batches, requests of WebSockets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from octavo.server.keys import Key, KeyStore
from tests.api.server import Server, serving
from tests.waiting import until

ADMIN = {"Authorization": "Bearer admin"}
BATCH = "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def simulated(folder: Path) -> Iterator[list[Server]]:
    """Two with the same texts."""
    with ExitStack() as stack:
        logs = [folder / f"simulated-{i}" for i in range(2)]
        yield [
            stack.enter_context(serving("--step", "5", log=log, does="simulate")) for log in logs
        ]


@contextmanager
def before(upstreams: list[Server], log: Path, *arguments: str) -> Iterator[Server]:
    named = [text for up in upstreams for text in ("--upstream", up.url)]
    options = (*named, "--routing", "round-robin", "--probe-interval", "0.2", *arguments)
    with serving(*options, log=log, does="gateway") as server:
        yield server


def client(server: Server, key: str = "x") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key=key,
        max_retries=0,
        timeout=60,
        _strict_response_validation=True,
    )


def made(asked: openai.OpenAI, text: str, **fields: Any) -> Any:
    return asked.responses.create(
        model="smollm2", input=text, temperature=0, max_output_tokens=8, **fields
    )


def completed(asked: openai.OpenAI, text: bytes, endpoint: Any) -> Any:
    """A batch of these lines, once it is."""
    given = asked.files.create(file=("in.jsonl", text), purpose="batch")
    batch = asked.batches.create(input_file_id=given.id, endpoint=endpoint, completion_window="24h")
    until(lambda: asked.batches.retrieve(batch.id).status in ("completed", "failed"))
    batch = asked.batches.retrieve(batch.id)
    assert batch.status == "completed", batch
    return batch


def test_responses_are_found_at_who_keeps_them(
    server: Server, folder: Path, tmp_path: Path
) -> None:
    """Whichever upstream has made one continues it, shows it and forgets it, over a restart of the
    gateway; streamed, whole and in the background."""
    database = ("--database", str(tmp_path / "gateway.sqlite3"))
    with serving("smollm2", "--offline", log=tmp_path / "second") as second:
        behind, log = [server, second], tmp_path / "gateway"
        with before(behind, log, *database) as gateway, client(gateway) as asked:
            firsts = [made(asked, f"Tell me about {i}.") for i in range(2)]
            *_, last = made(asked, "Say hello.", stream=True)
            firsts.append(last.response)
            began = made(asked, "Say more.", background=True, store=True)
        with before(behind, log, *database) as gateway, client(gateway) as asked:
            keepers = set()
            for first in firsts:
                assert asked.responses.retrieve(first.id) == first
                raw = asked.responses.with_raw_response.retrieve(first.id)
                keepers.add(raw.headers["x-replica"])
                turns = [made(asked, "Why?", previous_response_id=first.id) for _ in range(3)]
                assert len({turn.output_text for turn in turns}) == 1
                items = asked.responses.input_items.list(turns[0].id).data
                assert [item.content[0].text for item in items] == ["Why?"]  # type: ignore[union-attr,index]
            assert len(keepers) == 2
            follows = {"input": "Why?", "previous_response_id": first.id, "max_output_tokens": 8}
            line = {
                "custom_id": "a",
                "url": "/v1/responses",
                "body": follows | {"model": "smollm2"},
            }
            batch = completed(asked, json.dumps(line).encode(), "/v1/responses")
            reply = json.loads(asked.files.content(batch.output_file_id).text)["response"]["body"]
            assert asked.responses.retrieve(reply["id"]).output_text == turns[0].output_text
            assert asked.responses.cancel(began.id).id == began.id
            asked.responses.delete(firsts[0].id)
            for gone in (firsts[0].id, "resp_unknown"):
                with pytest.raises(openai.NotFoundError) as raised:
                    made(asked, "Why?", previous_response_id=gone)
                assert raised.value.code == "response_not_found"
            usage = firsts[1].usage.total_tokens
            assert usage == firsts[1].usage.input_tokens + 8
    server.wait_idle()


def test_what_a_lost_upstream_kept_is_said_to_be_away(server: Server, tmp_path: Path) -> None:
    with serving("smollm2", "--offline", log=tmp_path / "second") as second:
        arguments = ("--queue-timeout", "1", "--admin-key", "admin")
        with (
            before([server, second], tmp_path / "gateway", *arguments) as gateway,
            client(gateway) as asked,
        ):
            kept: dict[str, str] = {}
            for i in range(2):
                raw = asked.responses.with_raw_response.create(
                    model="smollm2", input=f"{i}", max_output_tokens=2
                )
                kept[raw.headers["x-replica"]] = raw.parse().id
            name = second.url.partition("://")[2]
            second.stop()
            until(lambda: gateway.metric("octavo_upstream_state", replica=name, state="down"))
            with pytest.raises(openai.InternalServerError) as away:
                asked.responses.retrieve(kept.pop(name))
            assert (away.value.status_code, away.value.code) == (503, "no_upstream")
            (left,) = kept.values()
            assert made(asked, "Why?", previous_response_id=left).output_text


def lines(number: int) -> bytes:
    bodies = [{"model": "simulated", "prompt": f"p{i}", "max_tokens": 8} for i in range(number)]
    return b"".join(
        json.dumps({"custom_id": str(i), "method": "POST", "url": BATCH, "body": body}).encode()
        + b"\n"
        for i, body in enumerate(bodies)
    )


def text(server: Server, prompt: str, tokens: int = 8) -> str:
    with client(server) as asked:
        reply = asked.completions.create(model="simulated", prompt=prompt, max_tokens=tokens)
    return reply.choices[0].text


def test_batches_are_spread_and_belong_to_a_key(
    simulated: list[Server], folder: Path, tmp_path: Path
) -> None:
    """Files and batches are the gateway's own, over a restart, and nobody else's."""
    keys, data = tmp_path / "keys", str(tmp_path / "data")
    anna, other = (KeyStore(str(keys)).create(Key(name)) for name in ("anna", "other"))
    options = ("--keys", str(keys), "--data-dir", data)
    expected = {str(i): text(simulated[0], f"p{i}") for i in range(40)}
    with (
        before(simulated, tmp_path / "gateway", *options) as gateway,
        client(gateway, anna) as asked,
    ):
        batch = completed(asked, lines(40), "/v1/completions")
        gateway.headers = {"Authorization": f"Bearer {anna}"}
        for up in simulated:
            name = up.url.partition("://")[2]
            assert gateway.metric("octavo_upstream_requests_total", replica=name) >= 10
    with (
        before(simulated, tmp_path / "gateway", *options) as gateway,
        client(gateway, anna) as asked,
        client(gateway, other) as others,
    ):
        assert [one.id for one in asked.batches.list()] == [batch.id]
        assert list(others.batches.list()) == list(others.files.list()) == []
        with pytest.raises(openai.NotFoundError):
            others.files.content(batch.input_file_id)
        out = asked.files.content(str(batch.output_file_id)).text.splitlines()
        replies = {one["custom_id"]: one["response"]["body"] for one in map(json.loads, out)}
        assert {id: body["choices"][0]["text"] for id, body in replies.items()} == expected


def test_requests_of_a_socket_go_where_others_go(simulated: list[Server], tmp_path: Path) -> None:
    """One socket, both upstreams; a stream goes on when its upstream is removed, an end is felt."""
    options = ("--admin-key", "admin", "--api-key", "key")
    with before(simulated, tmp_path / "gateway", *options) as gateway:
        gateway.headers = ADMIN
        url, key = f"ws://127.0.0.1:{gateway.port}/v1/ws", {"Authorization": "Bearer key"}
        with pytest.raises(InvalidStatus):
            connect(url, proxy=None)
        names = [up.url.partition("://")[2] for up in simulated]
        with connect(url, additional_headers=key, proxy=None) as socket:
            for i in range(4):
                body = {"model": "simulated", "prompt": f"s{i}", "max_tokens": 200, "stream": True}
                socket.send(json.dumps({"id": str(i), "path": "/v1/completions", "body": body}))
            said: dict[str, list[str]] = {str(i): [] for i in range(4)}
            open_ids = set(said)
            removed = False
            while open_ids:
                told = json.loads(socket.recv(20))
                if told.get("done"):
                    open_ids.remove(told["id"])
                else:
                    said[told["id"]].append(told["chunk"]["choices"][0]["text"])
                if not removed and all(said.values()):
                    removed = True
                    for name in names:
                        assert gateway.metric("octavo_upstream_requests_running", replica=name) == 2
                    gateway.post("/v1/upstreams/remove", {"upstream": names[0]}, ADMIN)
            until(lambda: gateway.metric("octavo_upstream_failovers_total") == 2)
            socket.send(json.dumps({"id": "x", "path": "/v1/nothing", "body": {}}))
            assert json.loads(socket.recv(20))["status"] == 404
    for i, parts in enumerate(said.values()):
        assert "".join(parts) == text(simulated[0], f"s{i}", 200)
