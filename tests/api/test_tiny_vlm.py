"""The small model that comes with the package, asked about drawings over HTTP by real clients."""

from __future__ import annotations

import base64
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch
from langchain_openai import ChatOpenAI
from PIL import Image, ImageDraw
from transformers import AutoProcessor, LlavaForConditionalGeneration

import octavo
from tests.api.server import Server, serving

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "assets" / "tiny_vlm"
sys.path.insert(0, str(ROOT / "examples" / "tiny_vlm"))
from scenes import held_out  # noqa: E402

QUESTIONS = 100
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(
        "tiny-vlm",
        "--offline",
        "--media-domain",
        "allowed.test",
        log=tmp_path_factory.mktemp("server") / "log",
    ) as s:
        yield s


def data_url(data: bytes) -> str:
    kind = "png" if data.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def shown(*files: bytes, text: str) -> list[dict[str, Any]]:
    """Messages that show files and ask about them."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_url(f)}} for f in files
    ]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def drawing(
    *shapes: tuple[str, str, tuple[int, int, int, int]],
    size: tuple[int, int] = (200, 150),
    kind: str = "PNG",
) -> bytes:
    """A plain drawing of (circle or square, color, box), as anybody would make it."""
    image = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(image)
    for shape, color, box in shapes:
        {"circle": pen.ellipse, "square": pen.rectangle}[shape](box, fill=color)
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


CIRCLE = drawing(("circle", "red", (60, 40, 140, 120)))


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


def ask(server: Server, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    status, reply = server.post(CHAT, {"messages": messages, "max_tokens": 12, **more})
    assert status == 200, reply
    return reply


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


def test_openai_client(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="x")
    messages: Any = shown(CIRCLE, text="What color is the circle?")
    whole = client.chat.completions.create(model="tiny-vlm", messages=messages)
    assert whole.choices[0].message.content == "red"
    details = json.loads(whole.model_dump_json())["usage"]["prompt_tokens_details"]
    assert details["image_tokens"] == 36
    stream = client.chat.completions.create(model="tiny-vlm", messages=messages, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == "red"
    with pytest.raises(openai.BadRequestError, match="is a damaged or truncated image file") as e:
        client.chat.completions.create(model="tiny-vlm", messages=shown(CIRCLE[:90], text="?"))  # type: ignore[arg-type]
    assert e.value.param == "messages[0].content[0].image_url"


def test_langchain(server: Server) -> None:
    client = ChatOpenAI(base_url=server.url + "/v1", api_key="x", model="tiny-vlm", temperature=0)  # type: ignore[arg-type]
    assert client.invoke(shown(CIRCLE, text="What color is the circle?")).content == "red"


def test_a_second_question(server: Server) -> None:
    """Of one image: its encoder does not run again, and its prompt begins in the prefix cache."""
    file = drawing(("square", "blue", (20, 30, 90, 100)))
    first = shown(file, text="What color is the square?")
    answer = ask(server, first)["choices"][0]["message"]
    before = server.metric("octavo_images_encoded_total")
    again = ask(server, [*first, answer, {"role": "user", "content": "How many shapes are there?"}])
    assert server.metric("octavo_images_encoded_total") == before
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 36


def test_python_api() -> None:
    """A PIL.Image, a path's bytes and a data: URL of one picture: one answer."""
    picture = Image.open(io.BytesIO(CIRCLE))
    with octavo.LLM("tiny-vlm", memory="1GiB", threads=1) as llm:
        answers = []
        for part in (
            {"type": "image", "image": picture},
            {"type": "image", "image": CIRCLE},
            {"type": "image_url", "image_url": {"url": data_url(CIRCLE)}},
        ):
            content = [part, {"type": "text", "text": "What color is the circle?"}]
            (reply,) = llm.chat([{"role": "user", "content": content}])
            answers.append((reply.text, reply.prompt_tokens))
    assert len(set(answers)) == 1 and answers[0][0] == "red"


HOSTILE: dict[str, Any] = {
    "url": "http://127.0.0.1:9/a.png",
    "allowed host inside": "http://allowed.test/a.png",
    "file": "file:///etc/passwd",
    "truncated": data_url(CIRCLE[:90]),
    "text": data_url(b"no image at all"),
    "padding": data_url(CIRCLE) + "=",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_images(server: Server, name: str) -> None:
    messages = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": HOSTILE[name]}}]}
    ]
    engine = server.engine().pid
    for stream in (False, True):
        status, reply = server.post(CHAT, {"messages": messages, "stream": stream})
        assert (status, reply["error"]["param"]) == (400, "messages[0].content[0].image_url")
        assert "0x" not in json.dumps(reply)
    assert server.engine().pid == engine


@pytest.mark.parametrize("kind", ["input_audio", "video_url", "image_embeds", "prompt_embeds"])
def test_other_media(server: Server, kind: str) -> None:
    messages = [{"role": "user", "content": [{"type": kind, kind: {"url": "data:,"}}]}]
    status, reply = server.post(CHAT, {"messages": messages})
    assert status == 400 and reply["error"]["param"].startswith("messages[0].content[0].")


def test_markdown_is_text(server: Server) -> None:
    """Addresses in a text are not visited, and a placeholder in it is no image."""
    text = "look ![](http://127.0.0.1:9/x) <img src='http://127.0.0.1:9/y'> <image>"
    usage = ask(server, [{"role": "user", "content": text}])["usage"]
    assert "image_tokens" not in usage["prompt_tokens_details"]


def test_processor_options_are_refused(server: Server) -> None:
    body = {"messages": shown(CIRCLE, text="?"), "mm_processor_kwargs": {"max_pixels": 10**9}}
    status, reply = server.post(CHAT, body)
    assert (status, reply["error"]["param"]) == (400, "mm_processor_kwargs")


def test_memory_returns(server: Server) -> None:
    """Large pictures, some of them broken, leave nothing behind in the server."""
    out = io.BytesIO()
    Image.new("RGB", (3000, 2000), "white").save(out, "PNG")
    files = [out.getvalue(), out.getvalue()[:2000]]
    process = psutil.Process(server.process.pid)

    def round_() -> int:
        with httpx.Client(timeout=60) as client:
            for file in files * 3:
                body = {"messages": shown(file, text="How many shapes are there?"), "max_tokens": 4}
                client.post(server.url + CHAT, json=body)
        server.wait_idle()
        return process.memory_info().rss

    before = round_()
    assert round_() - before < 32 << 20
