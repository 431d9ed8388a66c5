"""Models are fetched while serving, as `octavo pull` fetches them, and served from then on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ollama
import pytest
from gguf import GGMLQuantizationType

from tests.api.server import Server, serving
from tests.fake_hub import FakeHub
from tests.small_models import Small, save_gguf
from tests.waiting import until

REPOSITORY = "org/small-GGUF"
SAY = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def repos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("repository")
    save_gguf(Small(heads=6), folder / "small-Q8_0.gguf", GGMLQuantizationType.Q8_0)
    return {REPOSITORY: folder}


@contextmanager
def server(repos: dict[str, Path], folder: Path, *options: str) -> Iterator[Server]:
    """A server of another model, which knows a hub."""
    save_gguf(Small(), folder / "first.gguf", GGMLQuantizationType.Q8_0)
    with FakeHub(repos) as hub:
        env = {
            "HF_HOME": str(folder / "hf"), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1", "OCTAVO_CACHE": str(folder / "octavo"),
        }  # fmt: skip
        given = [str(folder / "first.gguf"), "--memory", "290MiB", *options]
        with serving(*given, log=folder / "log", env=os.environ | env) as one:
            yield one


def names(one: Server) -> dict[str, str]:
    return {m["id"]: m["state"] for m in json.loads(one.get("/v1/models")[1])["data"]}


def test_a_model_that_is_pulled_is_served(repos: dict[str, Path], tmp_path: Path) -> None:
    with server(repos, tmp_path) as one:
        client = ollama.Client(host=one.url)
        lines = list(client.pull(REPOSITORY, stream=True))
        told = [line.status for line in lines]
        assert (told[0], told[-1]) == ("pulling manifest", "success")
        size = (repos[REPOSITORY] / "small-Q8_0.gguf").stat().st_size
        moved = [(line.completed, line.total) for line in lines[1:-1]]
        assert moved[-1] == (size, size) and moved == sorted(moved)
        assert names(one) == {"first": "ready", REPOSITORY: "unloaded"}
        status, made = one.post("/v1/completions", {"model": REPOSITORY, **SAY})
        assert (status, made["usage"]["completion_tokens"]) == (200, 4)
        assert client.pull(REPOSITORY).status == "success"  # it is here
        for name in (str(tmp_path / "first.gguf"), "first", "org/nothing", ".."):
            with pytest.raises(ollama.ResponseError) as error:
                client.pull(name)
            assert error.value.status_code == 404
        (*_, last) = one.call("POST", "/api/pull", b'{"name": "org/nothing"}')[1].splitlines()
        assert "org/nothing" in json.loads(last)["error"]
        assert str(tmp_path) not in last
        assert sorted(names(one)) == ["first", REPOSITORY]
        client.close()


def test_who_may_not(repos: dict[str, Path], tmp_path: Path) -> None:
    with server(repos, tmp_path, "--api-key", "a", "--admin-key", "b", "--offline") as one:
        one.headers = {"authorization": "Bearer a"}
        asked: Any = {"model": REPOSITORY, "stream": False}
        assert one.post("/api/pull", asked)[0] == 401
        assert one.post("/api/pull", asked, {"authorization": "Bearer a"})[0] == 403
        status, reply = one.post("/api/pull", asked, {"authorization": "Bearer b"})
        assert status == 400 and reply["error"].startswith("model: nothing can be fetched")
        admin = {"authorization": "Bearer b"}
        for method, path in (
            ("DELETE", "/api/delete"),
            ("POST", "/api/copy"),
            ("POST", "/api/push"),
        ):
            status, text = one.call(method, path, b"{}", admin)
            assert status == 400 and "error" in json.loads(text)
        assert not (tmp_path / "hf").exists()


def test_a_client_that_leaves_ends_nothing(repos: dict[str, Path], tmp_path: Path) -> None:
    with server(repos, tmp_path) as one:
        client = ollama.Client(host=one.url)
        left = client.pull(REPOSITORY, stream=True)
        assert next(left).status == "pulling manifest"
        left.close()
        client.close()
        until(lambda: REPOSITORY in names(one))
