"""The small model that comes with the package, asked about drawings over HTTP."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration

from tests.api.server import Server, serving
from tests.api.test_images import ask, drawing, shown

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "assets" / "tiny_vlm"
sys.path.insert(0, str(ROOT / "examples" / "tiny_vlm"))
from scenes import held_out  # noqa: E402

QUESTIONS = 100


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(
        "tiny-vlm",
        "--offline",
        log=tmp_path_factory.mktemp("server") / "log",
    ) as s:
        yield s


@torch.no_grad()
def reference(asked: list[tuple[bytes, str, str]]) -> list[str]:
    """What transformers answers, from the same files."""
    processor = AutoProcessor.from_pretrained(FOLDER)
    model = LlavaForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32).eval()
    answers = []
    for data, question, _ in asked:
        content = [
            {"type": "image", "image": Image.open(io.BytesIO(data))},
            {"type": "text", "text": question},
        ]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=True, return_dict=True,
            return_tensors="pt", add_generation_prompt=True,
        )  # fmt: skip
        made = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        answers.append(
            processor.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        )
    return answers


def test_answers_beside_transformers(server: Server) -> None:
    """Held-out questions: accuracy within a point of transformers', from the same files."""
    asked = held_out(QUESTIONS)
    wanted = [answer for *_, answer in asked]
    theirs = [a == w for a, w in zip(reference(asked), wanted, strict=True)]
    ours = [
        ask(server, shown(data, text=question))["choices"][0]["message"]["content"] == answer
        for data, question, answer in asked
    ]
    assert abs(sum(ours) - sum(theirs)) <= QUESTIONS // 100


def test_ollamas_clients_are_told_that_it_sees(server: Server) -> None:
    status, shown = server.post("/api/show", {"model": "tiny-vlm"})
    assert (status, shown["capabilities"]) == (200, ["completion", "tools", "vision"])


def test_plain_drawings(server: Server) -> None:
    """As anybody would make them, in any size, asked by a client that knows nothing of this server."""
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="x")

    def answer(file: bytes, question: str) -> str | None:
        messages: Any = shown(file, text=question)
        reply = client.chat.completions.create(model="tiny-vlm", messages=messages)
        return reply.choices[0].message.content

    circle = drawing(("circle", "red", (60, 40, 140, 120)))
    assert answer(circle, "What color is the circle?") == "red"
    assert answer(circle, "How many shapes are there?") == "one"
    two = ("circle", "blue", (40, 60, 260, 280)), ("square", "yellow", (340, 120, 560, 340))
    large = drawing(*two, size=(640, 400), kind="JPEG")
    assert answer(large, "What shape is yellow?") == "square"
    assert answer(large, "How many shapes are there?") == "two"
