"""Three real models under a budget for two: any is there when it is asked for, and says what it says alone."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from gguf import GGMLQuantizationType

import octavo
from tests.api.server import Server, serving
from tests.small_models import Small, save_gguf
from tests.waiting import until

REQUESTS, CLIENTS = 48, 8
BUDGET = 290  # MiB: each takes 123
Asked = tuple[str, list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models a, b and c, which differ in their sizes."""
    place = tmp_path_factory.mktemp("models")
    for i, name in enumerate("abc"):
        save_gguf(Small(heads=4 + 2 * i), place / f"{name}.gguf", GGMLQuantizationType.Q8_0)
    return place


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    rng = random.Random(11)
    return [(rng.choice("abc"), [rng.randrange(256) for _ in range(9)]) for _ in range(REQUESTS)]


@pytest.fixture(scope="module")
def alone(folder: Path, asked: list[Asked]) -> list[list[int]]:
    """What each model says to its requests when there is nothing else."""
    said: dict[int, list[int]] = {}
    params = octavo.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for name in "abc":
        mine = [i for i, (model, _) in enumerate(asked) if model == name]
        with octavo.LLM(str(folder / f"{name}.gguf"), memory="200MiB") as llm:
            replies = llm.generate([asked[i][1] for i in mine], params, progress=False)
        said |= {i: reply.tokens for i, reply in zip(mine, replies, strict=True)}
    return [said[i] for i in range(len(asked))]


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    names = [str(folder / f"{name}.gguf") for name in "abc"]
    options = ["--memory", f"{BUDGET}MiB", "--alias", "gpt-4o=b", "--packed-cache"]
    with serving(*names, *options, log=folder / "log") as one:
        yield one


def complete(server: Server, name: str, prompt: list[int]) -> tuple[int, Any]:
    body = {"model": name, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    return server.post("/v1/completions", body | {"return_token_ids": True, "ignore_eos": True})


def states(server: Server) -> dict[str, str]:
    return {m["id"]: m["state"] for m in json.loads(server.get("/v1/models")[1])["data"]}


class Peak:
    """The most memory that the engines of a server have had together, looked at all the time."""

    def __init__(self, server: Server) -> None:
        self._front = psutil.Process(server.process.pid)
        self.bytes, self.engines, self._over = 0, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            sizes = []
            for child in self._front.children():
                try:
                    if "octavo.client.engine_process" in child.cmdline():
                        sizes.append(child.memory_info().rss)
                except psutil.Error:
                    continue  # it has just ended
            self.bytes, self.engines = max(self.bytes, sum(sizes)), max(self.engines, len(sizes))

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def test_mixed_requests(server: Server, asked: list[Asked], alone: list[list[int]]) -> None:
    assert states(server) == {"a": "ready", "b": "ready", "c": "unloaded"}
    with Peak(server) as peak, ThreadPoolExecutor(CLIENTS) as clients:
        replies = list(clients.map(lambda each: complete(server, *each), asked))
    assert [status for status, _ in replies] == [200] * REQUESTS
    assert [reply["choices"][0]["token_ids"] for _, reply in replies] == alone
    assert 0 < peak.bytes < BUDGET << 20 and peak.engines == 2
    assert sorted(states(server).values()) == ["ready", "ready", "unloaded"]
    assert server.get("/health")[0] == 200


def test_models_are_loaded_and_unloaded_by_hand(
    server: Server, asked: list[Asked], alone: list[list[int]]
) -> None:
    assert server.post("/v1/models/unload", {"model": "a"})[1]["state"] == "unloaded"
    assert states(server)["a"] == "unloaded"
    began = time.monotonic()
    status, reply = server.post("/v1/models/load", {"model": "a", "pinned": True})
    assert (status, reply) == (200, {"model": "a", "state": "ready", "pinned": True})
    assert time.monotonic() - began < 30
    for name in ("b", "c", "b"):
        assert complete(server, name, asked[0][1])[0] == 200
        assert states(server)["a"] == "ready"
    assert server.post("/v1/models/load", {"model": "a", "pinned": False})[1]["pinned"] is False
    status, reply = server.post("/v1/models/load", {"model": "d"})
    assert (status, reply["error"]["code"]) == (404, "model_not_found")
    first = next(i for i, (name, _) in enumerate(asked) if name == "b")
    status, reply = complete(server, "gpt-4o", asked[first][1])  # an alias
    assert (reply["model"], reply["choices"][0]["token_ids"]) == ("b", alone[first])


def test_a_killed_engine_comes_back(server: Server, asked: list[Asked]) -> None:
    """As one model's does; the other's goes on."""
    name, prompt = asked[0]
    before = complete(server, name, prompt)
    front = psutil.Process(server.process.pid)
    (engine,) = [c for c in front.children() if c.cmdline()[-1] == name]
    engine.kill()
    after = complete(server, name, prompt)
    assert (after[0], after[1]["choices"]) == (200, before[1]["choices"])


def test_ps_names_what_is_loaded(server: Server) -> None:
    command = [sys.executable, "-m", "octavo.cli.main", "ps", "--json"]
    found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    (own,) = [each for each in found if each["pid"] == server.process.pid]
    ready = sorted(name for name, state in states(server).items() if state == "ready")
    assert sorted(own["loaded"]) == ready and own["state"] == "ready"


def test_a_folder_is_served_as_it_is(folder: Path, tmp_path: Path) -> None:
    """Nothing is loaded before it is asked for; what is put there is found; what is damaged, or too
    large, is refused, and nothing else; idle models leave."""
    place = tmp_path / "models"
    (place / "org").mkdir(parents=True)
    (place / "a.gguf").symlink_to(folder / "a.gguf")
    (place / "org" / "b.gguf").symlink_to(folder / "b.gguf")
    (place / "damaged.gguf").write_bytes(b"GGUF" + bytes(60))
    options = ["--models-dir", str(place), "--memory", "150MiB", "--keep-alive", "3s"]
    with serving(*options, log=tmp_path / "log") as one:
        assert states(one) == {"a": "unloaded", "damaged": "unloaded", "org/b": "unloaded"}
        assert psutil.Process(one.process.pid).children() == []
        for name in ("a", "org/b"):
            assert complete(one, name, [1, 2, 3])[0] == 200
        status, reply = complete(one, "damaged", [1, 2, 3])
        assert (status, reply["error"]["code"]) == (400, "invalid_model")
        assert str(place) not in json.dumps(reply)
        assert states(one)["org/b"] == "ready"
        (place / "late.gguf").symlink_to(folder / "c.gguf")
        until(lambda: "late" in states(one) and set(states(one).values()) == {"unloaded"})
        assert complete(one, "late", [1, 2, 3])[0] == 200


def test_what_the_caches_hold_is_served_on_demand(folder: Path, tmp_path: Path) -> None:
    """A model comes when it is named and leaves for another; one that is pinned stays."""
    for name in "bc":
        cached = tmp_path / "hub" / f"models--org--{name}"
        (cached / "snapshots" / "0").mkdir(parents=True)
        (cached / "snapshots" / "0" / "model-Q8_0.gguf").symlink_to(folder / f"{name}.gguf")
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text("0")
    options = ["--on-demand", "--pin", "a", "--offline", "--memory", f"{BUDGET}MiB"]
    env = {"HF_HOME": str(tmp_path), "OCTAVO_CACHE": str(tmp_path / "octavo")}
    with serving(str(folder / "a.gguf"), *options, log=tmp_path / "log", env=env) as one:
        assert {"a": "ready", "org/b": "unloaded", "org/c": "unloaded"}.items() <= states(
            one
        ).items()
        for name, other in (("org/b", "org/c"), ("org/c", "org/b")):
            assert complete(one, name, [1, 2, 3])[0] == 200
            now = states(one)
            assert (now["a"], now[name], now[other]) == ("ready", "ready", "unloaded")
