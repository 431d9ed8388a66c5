"""Adapters over HTTP: named at start, loaded and unloaded while streams run."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.api.server import Server, serving
from tests.parity.test_lora import make_adapter

MODULES = {
    "self_attn.q_proj": (576, 576),
    "self_attn.v_proj": (576, 192),
    "mlp.down_proj": (1536, 576),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for i, name in enumerate(("first", "second", "third")):
        make_adapter(root / name, i, rank=16, layers=30, modules=MODULES, dtype=torch.bfloat16)
    make_adapter(root / "strange", 1, layers=1, modules={"self_attn.x_proj": (4, 4)})
    (root / "way-out").symlink_to("/")
    return root


@pytest.fixture(scope="module")
def adapted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--lora", f"first={folder / 'first'}", "--lora-dir", str(folder))
    log = tmp_path_factory.mktemp("adapted") / "log"
    with serving("smollm2", "--offline", *options, log=log) as server:
        yield server


def complete(server: Server, model: str, **changes: Any) -> tuple[int, Any]:
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    return server.post("/v1/completions", body | changes)


def text(server: Server, model: str) -> str:
    status, reply = complete(server, model)
    assert status == 200 and reply["model"] == model
    return str(reply["choices"][0]["text"])


def test_loaded_while_streams_run(adapted: Server, folder: Path) -> None:
    base, first = text(adapted, "smollm2"), text(adapted, "first")
    assert base != first
    failures: list[str] = []
    stop = threading.Event()

    def sing(model: str, golden: str) -> None:
        while not stop.is_set():
            if text(adapted, model) != golden:
                failures.append(model)

    singers = [threading.Thread(target=sing, args=a) for a in (("smollm2", base), ("first", first))]
    for singer in singers:
        singer.start()
    for _ in range(3):
        for name in ("second", "third"):
            status, reply = adapted.post(
                "/v1/load_lora_adapter", {"lora_name": name, "lora_path": name}
            )
            assert status == 200, reply
        assert len({text(adapted, n) for n in ("smollm2", "first", "second", "third")}) == 4
        cards = {m["id"]: m["parent"] for m in json.loads(adapted.get("/v1/models")[1])["data"]}
        assert cards == {
            "smollm2": None,
            "first": "smollm2",
            "second": "smollm2",
            "third": "smollm2",
        }
        for name in ("second", "third"):
            assert adapted.post("/v1/unload_lora_adapter", {"lora_name": name})[0] == 200
            assert complete(adapted, name)[0] == 404
    stop.set()
    for singer in singers:
        singer.join()
    assert not failures
    adapted.wait_idle()


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("x", "../x"), ("x", "/etc"), ("x", "way-out/etc"), ("x", "nothing"), ("x", ""), ("x", "."), ("x", "first\0"),
        ("smollm2", "second"), ("first", "second"), ("a b", "second"), ("", "second"), ("x", "strange"),
    ],
)  # fmt: skip
def test_what_is_no_adapter_here_is_refused(adapted: Server, name: str, path: str) -> None:
    status, reply = adapted.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
    assert status == 400 and reply["error"]["param"] in ("lora_name", "lora_path")
    assert str(Path.home()) not in str(reply) and "/tmp" not in str(reply)


def test_a_restarted_engine_has_its_adapters(adapted: Server) -> None:
    before = text(adapted, "first")
    os.kill(adapted.engine().pid, 9)
    assert text(adapted, "first") == before


def test_adapters_chat_and_embed(adapted: Server) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {
        "model": "first",
        "messages": messages,
        "max_tokens": 8,
        "structured_outputs": {"regex": "[a-z]{3}"},
    }
    status, reply = adapted.post("/v1/chat/completions", body)
    assert status == 200 and len(reply["choices"][0]["message"]["content"]) == 3
    vectors = [
        adapted.post("/v1/embeddings", {"model": m, "input": "x"})[1]["data"][0]["embedding"]
        for m in ("smollm2", "first")
    ]
    assert vectors[0] != vectors[1]


def test_without_adapters(server: Server) -> None:
    body = {"lora_name": "a", "lora_path": "b"}
    status, reply = server.post("/v1/load_lora_adapter", body)
    assert status == 400 and "--lora-dir" in reply["error"]["message"]
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "a"})[0] == 400
