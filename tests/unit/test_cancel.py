"""Requests have names by which they are found and ended; streams that wait show signs of life."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.checkpoint import open_checkpoint
from octavo.server import patience
from octavo.server.guard import Access
from octavo.text import Tokenizer, load_tokenizer
from tests.unit.fake_models import Listener, ScriptedClient, fake_model, listening
from tests.waiting import until

KEYS = ("one", "two")


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(smollm2))


@pytest.fixture
def silent(tokenizer: Tokenizer) -> Iterator[tuple[Listener, ScriptedClient]]:
    """A model that says nothing, for ever."""
    client = ScriptedClient([], hang=True)
    with listening(
        fake_model(tokenizer, "m", client=client), access=Access(api_keys=KEYS)
    ) as listener:
        yield listener, client


def key(name: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}", **more}


class Asking(threading.Thread):
    """A request in a thread of its own."""

    def __init__(self, listener: Listener, name: str, **more: Any) -> None:
        super().__init__()
        self._port, self._name = listener.port, name
        self._body = json.dumps({"prompt": "hi"} | more)
        self.start()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
        headers = key("one", **{"x-request-id": self._name})
        connection.request("POST", "/v1/completions", self._body, headers)
        response = connection.getresponse()
        self.status, self.id = response.status, response.headers["x-request-id"]
        self.text = response.read().decode()
        connection.close()


def test_a_request_is_cancelled_by_its_name(silent: tuple[Listener, ScriptedClient]) -> None:
    listener, client = silent
    first, second = Asking(listener, "my-request"), Asking(listener, "another")
    until(lambda: client.running == 2)
    path = "/v1/requests/my-request/cancel"
    assert listener.json(path, {}, **key("two"))[0] == 404  # of another key
    assert client.running == 2
    assert listener.json(path, {}, **key("one")) == (200, {"status": "cancelled"})
    first.join(5)
    assert (first.status, first.id) == (499, "my-request")
    assert json.loads(first.text)["error"]["code"] == "cancelled"
    until(lambda: client.running == 1)
    assert listener.json(path, {}, **key("one"))[0] == 404
    assert listener.json("/v1/requests/another/cancel", {}, **key("one"))[0] == 200
    second.join(5)
    assert second.status == 499


def test_a_stream_that_waits_shows_signs_of_life(
    silent: tuple[Listener, ScriptedClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "PATIENCE", 0.05)
    listener, client = silent
    asking = Asking(listener, "waits", stream=True)
    until(lambda: client.running == 1)
    time.sleep(0.3)
    assert listener.json("/v1/requests/waits/cancel", {}, **key("one"))[0] == 200
    asking.join(5)
    assert asking.status == 200 and set(asking.text.split("\n\n")) == {": waiting", ""}
    assert asking.text.count(": waiting") >= 3
    until(lambda: client.running == 0)


def test_late_texts_follow_the_comments(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    class Slow(ScriptedClient):
        async def submit(self, request: Any) -> Any:
            await asyncio.sleep(0.2)
            async for event in super().submit(request):
                yield event

    monkeypatch.setattr(patience, "PATIENCE", 0.05)
    said = tokenizer.encode("late but here", add_bos=False)
    with listening(fake_model(tokenizer, "m", client=Slow(said))) as listener:
        status, text = listener.ask("/v1/completions", {"prompt": "hi", "stream": True})
    assert status == 200 and text.startswith(": waiting\n\n")
    frames = [f.removeprefix("data: ") for f in text.split("\n\n") if f.startswith("data: ")]
    assert frames.pop() == "[DONE]"
    assert "".join(json.loads(f)["choices"][0]["text"] for f in frames) == "late but here"


@pytest.mark.parametrize("given", ["a b", "x" * 129, ""])
def test_other_names_are_the_servers_own(tokenizer: Tokenizer, given: str) -> None:
    with listening(fake_model(tokenizer, "m")) as listener:
        ids = []
        for _ in range(2):
            connection = http.client.HTTPConnection("127.0.0.1", listener.port, timeout=20)
            connection.request("GET", "/v1/models", headers={"x-request-id": given})
            response = connection.getresponse()
            response.read()
            ids.append(response.headers["x-request-id"])
            connection.close()
    assert len(set(ids)) == 2 and all(name.startswith("req_") for name in ids)
