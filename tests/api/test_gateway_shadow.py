"""A canary is shown what the old version answers: real engines, one of them with worse weights."""

from __future__ import annotations

import json
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from octavo.gateway.body import Relayed, read_outline
from octavo.gateway.shadow import SHADOW_TOKENS, greedy
from tests.api.server import Server, serving
from tests.waiting import until

ADMIN = {"Authorization": "Bearer admin"}
GUARDS = [{"metric": "shadow_kl", "max": 0.03}]


@pytest.fixture(scope="module")
def worse(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with one layer that hears its input louder."""
    path = tmp_path_factory.mktemp("worse") / "worse.gguf"
    shutil.copy(smollm2, path)
    tensors = {one.name: one.data for one in GGUFReader(path, "r+").tensors}
    tensors["blk.12.attn_norm.weight"][:] *= 1.5
    return path


def start(gateway: Server, canary: str, **more: Any) -> tuple[int, Any]:
    body = {"model": "smollm2", "stable": "default", "canary": canary, "steps": [20, 100],
            "hold": "1h", "max_hold": "2h", "guards": GUARDS, "shadow": "100%"} | more  # fmt: skip
    return gateway.post("/v1/releases", body, ADMIN)


def ask(gateway: Server, number: int) -> None:
    body = {"model": "smollm2", "max_tokens": 12, "user": f"{number}",
            "messages": [{"role": "user", "content": f"What is {number} + {number}?"}]}  # fmt: skip
    assert gateway.post("/v1/chat/completions", body)[0] == 200


def compared(gateway: Server, least: int) -> Any:
    """The release, once so many answers were compared or it has ended, while users ask."""
    users = count()

    def release() -> Any:
        return json.loads(gateway.get("/v1/releases?model=smollm2", ADMIN)[1])

    def enough() -> bool:
        for _ in range(8):
            ask(gateway, next(users))
        found = release()
        return found["guards"][0]["count"] >= least or found["phase"] != "running"

    until(enough)
    return release()


def test_the_same_weights_stay_and_worse_ones_go(
    server: Server, worse: Path, tmp_path: Path
) -> None:
    """The same are 0 nats apart, exactly; the others are rolled back by what no user has asked."""
    name = ("--name", "smollm2", "--offline")
    with (
        serving("smollm2", "--offline", log=tmp_path / "same") as same,
        serving(str(worse), *name, log=tmp_path / "worse") as other,
        serving(
            "--upstream", server.url, "--upstream", f"same={same.url}",
            "--upstream", f"worse={other.url}", "--admin-key", "admin",
            log=tmp_path / "gateway", does="gateway",
        ) as gateway,
    ):  # fmt: skip
        status, refused = start(gateway, "same", guards=[{"metric": "error_rate", "max": 0.01}])
        assert status == 400 and "shadow needs a guard" in refused["error"]["message"]
        assert start(gateway, "same", shadow="150%")[0] == 400
        assert start(gateway, "same")[0] == 200
        found = compared(gateway, 6)
        assert (found["phase"], found["guards"][0]["value"]) == ("running", 0.0)
        gateway.post("/v1/releases/rollback", {"model": "smollm2"}, ADMIN)
        assert start(gateway, "worse")[0] == 200
        found = compared(gateway, 1000)
        assert found["phase"] == "rolled_back" and found["reason"].startswith("shadow_kl > 0.03")
        for each in (server, same, other):
            each.wait_idle()
    assert "cannot be compared" not in (tmp_path / "gateway").read_text()


def test_servers_that_tell_too_little_are_named_once(tmp_path: Path) -> None:
    with (
        serving("--name", "smollm2", log=tmp_path / "old", does="simulate") as old,
        serving("--name", "smollm2", log=tmp_path / "new", does="simulate") as new,
        serving(
            "--upstream", old.url, "--upstream", f"new={new.url}", "--admin-key", "admin",
            log=tmp_path / "gateway", does="gateway",
        ) as gateway,
    ):  # fmt: skip
        assert start(gateway, "new")[0] == 200
        users = count()

        def told() -> bool:
            ask(gateway, next(users))  # a fifth of all users never has the old version
            return "cannot be compared" in (tmp_path / "gateway").read_text()

        until(told)
        for number in range(10):
            ask(gateway, number)
        found = json.loads(gateway.get("/v1/releases?model=smollm2", ADMIN)[1])
        assert (found["phase"], found["guards"][0]["count"]) == ("running", 0)
    said = (tmp_path / "gateway").read_text()
    assert said.count("versions of smollm2 cannot be compared: the old version tells no ids") == 1


def asked(path: str, **body: Any) -> Any:
    data = json.dumps(body).encode()
    return greedy(Relayed(path, path, data, read_outline(data)))


def test_what_is_compared() -> None:
    """The most likely answer to the same, not a long one; nothing of several prompts or of images."""
    chat, message = "/v1/chat/completions", {"role": "user", "content": "Hi"}
    found = asked(chat, model="m", messages=[message], n=3, temperature=1, max_tokens=500, tools=[])
    assert found == {
        "model": "m", "messages": [message], "tools": [], "temperature": 0,
        "max_tokens": SHADOW_TOKENS, "return_token_ids": True,
    }  # fmt: skip
    assert asked("/v1/completions", model="m", prompt="Hi", max_tokens=5)["max_tokens"] == 5
    parts = [{"role": "user", "content": ["Hi", {"type": "text", "text": "Ho"}]}]
    assert asked(chat, model="m", messages=parts)["messages"] == parts  # as vLLM takes them, too
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    several = [{"role": "user", "content": [{"type": "text", "text": "Hi"}, image]}]
    assert asked(chat, model="m", messages=several) is None
    assert asked("/v1/completions", model="m", prompt=["Hi", "Ho"]) is None
    assert asked("/v1/embeddings", model="m", input="Hi") is None
