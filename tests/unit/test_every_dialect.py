"""Limits, keys, leases and usage hold in every dialect, in the background and past the checks."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.checkpoint import open_checkpoint
from octavo.server.app import create_app
from octavo.server.dialects.openai.items_writer import ItemsWriter
from octavo.server.exchange import Exchange, exchange
from octavo.server.guard import Access, Keys, Principal, Unauthorized, principal
from octavo.server.keyring import Keyring
from octavo.server.keys import Key, KeyLimits, KeyStore, digest, salt_of
from octavo.server.loopback import Loopback
from octavo.server.metrics import Metrics
from octavo.server.store import Store, StoredResponse
from octavo.text import ChatTemplate, Tokenizer, load_tokenizer
from tests.unit.asgi import scope
from tests.unit.dialects import TEMPLATE
from tests.unit.fake_models import Listener, ScriptedClient, fake_model, listening, registry
from tests.waiting import until

SAID = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": SAID},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": SAID, "max_tokens": 8, "model": "ann"},
    "/api/chat": {"messages": SAID, "model": "ann", "stream": False},
    "/api/generate": {"prompt": "Hi", "model": "ann:latest", "stream": False},
}
MESSAGE = "the limit of 1 requests a minute is reached"


def body(path: str) -> Any:
    return {"model": "ann"} | BODIES[path]


def error(path: str, message: str) -> Any:
    """What an error looks like in a dialect."""
    if path.startswith("/api/"):
        return {"error": message}
    told = {"type": "rate_limit_error", "message": message}
    if path == "/v1/messages":
        return {"type": "error", "error": told}
    return {"error": told | {"param": None, "code": "rate_limit_exceeded"}}


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(smollm2))


class Served:
    """A model that begins a text, and goes on for ever if it hangs, for one key with limits."""

    def __init__(self, listener: Listener, file: KeyStore, ring: Keyring, secret: str) -> None:
        self.listener, self.file, self.ring, self.secret = listener, file, ring, secret
        self.account = ring._accounts["key"]
        self.entry = listener.models.entry("ann")

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.listener.port, timeout=20)
        given = {"x-api-key": self.secret} | headers
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data, given)
        response = connection.getresponse()
        text = response.read()
        connection.close()
        return response.status, json.loads(text), response.headers

    def recorded(self, count: int) -> list[Exchange]:
        """The exchanges, once there are `count`: each is recorded after its last byte is sent."""
        until(lambda: len(self.listener.exchanges) >= count)
        return list(self.listener.exchanges)

    def until_begun(self, id: str, tokens: int) -> None:
        """Until a request that runs has so many tokens."""

        def begun() -> bool:
            scopes = [s for each in self.listener.timelines.running.values() for s in each]
            usage = {one.id: one.usage for one in map(exchange, scopes)}.get(id)
            return usage is not None and usage.completion == tokens

        until(begun)

    def until_idle(self) -> None:
        until(lambda: not (self.entry.users or self.account.running or self.account.held))


@pytest.fixture
def served(
    tokenizer: Tokenizer, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Served]:
    limits, hang = request.param
    file = KeyStore(str(tmp_path / "keys.db"))
    secret = file.create(Key("key", limits=limits, models=("ann",)))
    ring = Keyring(file)
    client = ScriptedClient(tokenizer.encode("Once upon", add_bos=False), hang=hang)
    template = ChatTemplate(TEMPLATE, tokenizer)
    model = fake_model(tokenizer, "ann", client=client, template=template)
    other = fake_model(tokenizer, "bob", template=template)
    with listening(model, other, access=Access(keyring=ring)) as one:
        yield Served(one, file, ring, secret)
    model.end_workers()
    other.end_workers()


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("served", [(KeyLimits(requests_per_minute=1), False)], indirect=True)
def test_limits_hold(served: Served, path: str) -> None:
    status, _, headers = served.ask(path, body(path))
    assert (status, headers["x-ratelimit-remaining-requests"]) == (200, "0")
    status, told, headers = served.ask(path, body(path))
    assert (status, told) == (429, error(path, MESSAGE))
    assert 0 < int(headers["retry-after"]) <= 60


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("served", [(KeyLimits(), False)], indirect=True)
def test_models_and_usage_are_those_of_the_key(served: Served, path: str) -> None:
    assert served.ask(path, body(path) | {"model": "bob"})[0] == 403
    assert served.ask(path, body(path))[0] == 200
    served.until_idle()
    refused, made = served.recorded(2)
    assert (refused.key, refused.usage) == ("key", None)
    assert made.key == "key" and made.usage is not None and made.usage.completion == 2


@pytest.mark.parametrize(
    "served", [(KeyLimits(concurrent=1, tokens_per_minute=50), True)], indirect=True
)
def test_a_response_in_the_background_is_a_request_that_runs(served: Served) -> None:
    asked = body("/v1/responses") | {"background": True, "max_output_tokens": 8}
    status, queued, _ = served.ask("/v1/responses", asked, **{"x-request-id": "mine"})
    assert (status, queued["status"]) == (200, "queued")
    assert (served.entry.users, served.account.running) == (1, 1)
    assert served.account.held > 8 and not served.listener.exchanges
    status, told, _ = served.ask("/api/chat", body("/api/chat"))
    assert (status, told) == (429, {"error": "1 requests are running, which is the limit"})
    served.until_begun("mine", 2)
    assert served.ask("/v1/requests/mine/cancel", {})[0] == 200
    served.until_idle()
    assert served.ask(f"/v1/responses/{queued['id']}")[1]["status"] == "cancelled"
    (made,) = [e for e in served.recorded(4) if e.id == "mine"]
    assert made.status == 499 and made.key == "key" and made.usage is not None
    assert made.usage.completion == 2


@pytest.mark.parametrize("served", [(KeyLimits(), False)], indirect=True)
def test_an_error_in_the_background_ends_the_response(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> bytes:
        raise ValueError("a bug")

    monkeypatch.setattr(ItemsWriter, "whole", broken)
    asked = body("/v1/responses") | {"background": True}
    id = served.ask("/v1/responses", asked)[1]["id"]
    served.until_idle()
    told = served.ask(f"/v1/responses/{id}")[1]
    assert (told["status"], told["error"]["message"]) == ("failed", "the server could not answer")
    assert 500 in [one.status for one in served.recorded(2)]


def test_a_batch_keeps_to_the_limits_of_its_owner(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = KeyStore(str(tmp_path / "keys.db"))
    secret = file.create(Key("key", limits=KeyLimits(requests_per_minute=1)))
    access, done = Access(keyring=Keyring(file)), list[Exchange]()
    salt, keys = salt_of(digest(secret.encode())), Keys(access)
    asked: Any = {"type": "http", "headers": [(b"authorization", f"Bearer {secret}".encode())]}
    keys.check(asked)
    assert keys.owner(salt) == principal(asked)
    models, loopback = registry(fake_model(tokenizer, "ann")), Loopback()
    create_app(models, Metrics(models), access, done.append, loopback=loopback)

    async def twice() -> list[int]:
        body = b'{"prompt": "Hi"}'
        return [
            (await loopback.whole("/v1/completions", body, keys.owner(salt)))[0] for _ in range(2)
        ]

    assert asyncio.run(twice()) == [200, 429]
    assert [one.key for one in done] == ["key", "key"]
    file.revoke("key")
    assert access.keyring is not None
    access.keyring.save()
    with pytest.raises(Unauthorized):
        keys.owner(salt)


def test_a_socket_serves_no_key_that_is_revoked(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = KeyStore(str(tmp_path / "keys.db"))
    secret = file.create(Key("key"))
    ring, done, sent = Keyring(file), list[Exchange](), list[Any]()
    models = registry(fake_model(tokenizer, "ann"))
    app = create_app(models, Metrics(models), Access(keyring=ring), done.append)
    asked = scope("websocket", "/v1/ws", authorization=f"Bearer {secret}")

    async def talk() -> None:
        said: asyncio.Queue[Any] = asyncio.Queue()
        over = asyncio.Event()

        async def send(message: Any) -> None:
            sent.append(json.loads(message.get("text", "{}")))
            if sent[-1].get("done") or sent[-1].get("status", 200) != 200:
                over.set()

        socket = asyncio.create_task(app(asked, said.get, send))
        said.put_nowait({"type": "websocket.connect"})
        for id in "ab":
            text = json.dumps({"id": id, "path": "/v1/completions", "body": {"prompt": "Hi"}})
            over.clear()
            said.put_nowait({"type": "websocket.receive", "text": text})
            await asyncio.wait_for(over.wait(), 10)
            file.revoke("key")
            file.create(Key("key"))  # another of that name
            ring.save()
        said.put_nowait({"type": "websocket.disconnect", "code": 1000})
        await socket

    asyncio.run(talk())
    told = [(m["id"], m["status"]) for m in sent if "status" in m]
    assert told == [("a", 200), ("b", 401)]
    assert sent[-1]["body"]["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("served", [(KeyLimits(), False)], indirect=True)
def test_a_response_in_the_background_has_an_end_whatever_happens(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(self: ItemsWriter, choices: object) -> bytes:
        raise ValueError("a secret")

    monkeypatch.setattr(ItemsWriter, "whole", fails)
    asked = body("/v1/responses") | {"background": True}
    status, queued, _ = served.ask("/v1/responses", asked)
    assert status == 200
    served.until_idle()
    made = served.ask(f"/v1/responses/{queued['id']}")[1]
    assert (made["status"], made["error"]["code"]) == ("failed", "server_error")
    assert "secret" not in caplog.text + json.dumps(made) and "ValueError" in caplog.text


@pytest.mark.parametrize("served", [(KeyLimits(), False)], indirect=True)
def test_numbers_of_any_length_are_read(served: Served) -> None:
    for days in ("0", "3661", "00000130", "0" * 5 + "1" * 40, "1" * 5000):
        status, told, _ = served.ask(f"/v1/usage?days={days}")
        assert (status, told["error"]["param"]) == (400, "days")
    assert served.ask("/v1/usage?days=0030")[0] == 200
    made = served.ask("/v1/responses", body("/v1/responses"))[1]
    for limit in ("0", "101", "0000000001111", "1" * 5000):
        path = f"/v1/responses/{made['id']}/input_items?limit={limit}"
        status, told, _ = served.ask(path)
        assert (status, told["error"]["param"]) == (400, "limit")


@pytest.mark.parametrize("served", [(KeyLimits(), False)], indirect=True)
def test_each_route_is_recorded_under_its_own_name(served: Served) -> None:
    id = served.ask("/v1/responses", body("/v1/responses"))[1]["id"]
    for path in (f"/v1/responses/{id}", f"/responses/{id}/input_items", "/v1/models/ann"):
        assert served.ask(path)[0] == 200
    served.ask(f"/v1/responses/{id}/cancel", {})
    served.ask("/v1/requests/a/cancel", {})
    served.ask("/v1/nothing/a/b")
    assert [one.route for one in served.recorded(7)] == [
        "/v1/responses", "/v1/responses/{id}", "/v1/responses/{id}/input_items",
        "/v1/models/{name:path}", "/v1/responses/{id}/cancel", "/v1/requests/{id}/cancel", "other",
    ]  # fmt: skip


def test_a_line_of_a_cancelled_batch_ends_as_if_its_client_had_left(
    tokenizer: Tokenizer,
) -> None:
    client = ScriptedClient([], hang=True)
    models, loopback, done = (
        registry(fake_model(tokenizer, "ann", client=client)),
        Loopback(),
        list[Exchange](),
    )
    create_app(models, Metrics(models), Access(), done.append, loopback=loopback)

    async def test() -> None:
        asking = asyncio.create_task(
            loopback.whole("/v1/completions", b'{"prompt": "Hi"}', Principal())
        )
        while not client.running:
            await asyncio.sleep(0.001)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert asking.cancelled() and client.running == models.entry("ann").users == 0

    asyncio.run(test())
    assert [(one.status, one.code) for one in done] == [(499, None)]


@pytest.mark.parametrize("served", [(KeyLimits(), True)], indirect=True)
def test_a_response_that_is_forgotten_stays_forgotten(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, begun = Store.put, threading.Event()

    def slowly(self: Store, owner: str, one: StoredResponse) -> None:
        if one.status == "in_progress":
            begun.set()
            time.sleep(0.2)
        put(self, owner, one)

    monkeypatch.setattr(Store, "put", slowly)
    asked = body("/v1/responses") | {"background": True}
    path = f"/v1/responses/{served.ask('/v1/responses', asked)[1]['id']}"
    assert begun.wait(5)
    connection = http.client.HTTPConnection("127.0.0.1", served.listener.port, timeout=20)
    connection.request("DELETE", path, headers={"x-api-key": served.secret})
    assert connection.getresponse().status == 200
    connection.close()
    time.sleep(0.3)
    assert served.ask(path)[0] == 404
