"""Embeddings, reranking and scoring over HTTP, with the openai client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

import octavo
from tests.api.server import Server, serving
from tests.parity.test_encoders import dense, modules, small_encoder


@pytest.fixture(scope="module")
def encoder(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("encoder") / "log"
    with serving(str(minilm), "--name", "minilm", log=log) as server:
        yield server


def test_openai_embeddings(encoder: Server, minilm: Path) -> None:
    texts = ["one text", "another, longer text", "a"] * 40
    client = openai.OpenAI(base_url=encoder.url + "/v1", api_key="none", max_retries=0)
    reply = client.embeddings.create(model="minilm", input=texts)  # base64 by default
    plain = client.embeddings.create(model="minilm", input=texts, encoding_format="float")
    expected = octavo.LLM(str(minilm)).embed(texts[:3])
    for i, (a, b) in enumerate(zip(reply.data, plain.data, strict=True)):
        assert a.index == i and a.embedding == b.embedding
        assert (np.array(a.embedding, np.float32) == expected[i % 3]).all()
    assert reply.usage.prompt_tokens > len(texts)
    short = client.embeddings.create(model="minilm", input="one text", dimensions=16)
    vector = np.array(short.data[0].embedding)
    assert len(vector) == 16 and abs(np.linalg.norm(vector) - 1) < 1e-5
    encoder.wait_idle()


def test_modules_behind_the_pooling(tmp_path: Path) -> None:
    """A Dense module's vector is what embeddings, their first dimensions and scores are made of."""
    folder = tmp_path / "model"
    folder.mkdir()
    small_encoder(folder, "bert", head=False)
    modules(folder, {"pooling_mode": "mean"}, dense(60, 90, "Tanh", True), "Normalize")
    llm = octavo.LLM(str(folder))
    a, b = llm.embed(["w1 w2", "w3"])
    with serving(str(folder), "--name", "small", log=tmp_path / "log") as server:
        body: dict[str, Any] = {"model": "small", "input": ["w1 w2", "w3"]}
        data = server.post("/v1/embeddings", body)[1]["data"]
        assert [d["embedding"] for d in data] == [a.tolist(), b.tolist()] and len(a) == 90
        short = server.post("/v1/embeddings", body | {"dimensions": 70})[1]["data"][0]["embedding"]
        assert np.abs(np.array(short) - a[:70] / np.linalg.norm(a[:70])).max() < 1e-6
        status, error = server.post("/v1/embeddings", body | {"dimensions": 91})
        assert status == 400 and error["error"]["message"] == "dimensions is 91; 1 to 90"
        pair = {"model": "small", "text_1": "w1 w2", "text_2": "w3"}
        score = server.post("/v1/score", pair)[1]["data"][0]["score"]
        assert [score] == llm.rank("w1 w2", ["w3"]) and abs(score - float(a @ b)) < 1e-6


def test_rerank_and_score(encoder: Server) -> None:
    documents = ["Berlin is in Germany.", {"text": "Paris is the capital of France."}, "Cats."]
    body: dict[str, Any] = {
        "model": "minilm",
        "query": "capital of France?",
        "documents": documents,
    }
    reply = encoder.post("/v1/rerank", body | {"return_documents": True})[1]
    assert [r["index"] for r in reply["results"]] == [1, 0, 2]
    assert reply["results"][0]["document"]["text"].startswith("Paris")
    assert len(encoder.post("/rerank", body | {"top_n": 1})[1]["results"]) == 1
    score = encoder.post(
        "/v1/score", {"model": "minilm", "text_1": "capital of France?", "text_2": ["Cats."]}
    )[1]["data"]
    assert score[0]["score"] == reply["results"][2]["relevance_score"]


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("embeddings", {"input": ""}, "input"), ("embeddings", {"input": []}, "input"),
        ("embeddings", {"input": [1, "a"]}, "input"), ("embeddings", {"input": ["x"] * 3000}, "input"),
        ("embeddings", {"input": [[-1]]}, "input"), ("embeddings", {"input": "word " * 600}, "input"),
        ("embeddings", {"input": "x", "dimensions": 0}, "dimensions"),
        ("embeddings", {"input": "x", "dimensions": 385}, "dimensions"),
        ("embeddings", {"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ("embeddings", {"input": "x", "truncate": True}, "truncate"),
        ("rerank", {"query": "", "documents": ["a"]}, "documents"),
        ("rerank", {"query": "a", "documents": []}, "documents"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "model"),
        ("completions", {"prompt": "x"}, "model"),
    ],
)  # fmt: skip
def test_refused_by_name(encoder: Server, path: str, change: dict[str, Any], param: str) -> None:
    status, reply = encoder.post("/v1/" + path, {"model": "minilm"} | change)
    assert (status, reply["error"]["param"]) == (400, param)


def test_decoders_embed_too(server: Server) -> None:
    body = {"model": "smollm2", "input": ["The capital of France is", "x"]}
    first = server.post("/v1/embeddings", body)[1]["data"]
    assert first == server.post("/v1/embeddings", body)[1]["data"]
    assert len(first[0]["embedding"]) == 576
    ids = [server.post("/tokenize", {"prompt": text})[1]["tokens"] for text in body["input"]]
    assert first == server.post("/v1/embeddings", body | {"input": ids})[1]["data"]
    assert first[:1] == server.post("/v1/embeddings", body | {"input": ids[0]})[1]["data"]
    server.wait_idle()


def test_without_a_text_ollama_gives_no_vector(encoder: Server) -> None:
    for nothing in ("", []):
        body = {"model": "minilm", "input": nothing}
        expected = {"model": "minilm", "embeddings": [], "prompt_eval_count": 0}
        assert encoder.post("/api/embed", body) == (200, expected)
    assert encoder.post("/api/embeddings", {"model": "minilm", "prompt": ""}) == (
        200,
        {"embedding": []},
    )
    assert encoder.post("/api/embed", {"model": "minilm", "input": [""]})[0] == 400
