"""Images over HTTP, as real clients send them, to a small model with random weights."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest
import torch
from click.testing import CliRunner
from langchain_openai import ChatOpenAI
from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import octavo
from octavo.cli.chat import chat
from octavo.cli.conversation import Conversation
from tests.api.server import Server, serving
from tests.vision_models import PLACEHOLDER, VISION_FAMILIES, picture

CHAT = "/v1/chat/completions"
IMAGE_TOKENS = 25
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: "
    "{% for p in m['content'] %}{{ '<image>' if p['type'] == 'image' else p['text'] }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
VIDEO_TOKENS = ("<video>", "<begin>", "<end>")
VIDEO_TEMPLATE = TEMPLATE.replace(
    "else p['text']", "else '<begin><video><end>' if p['type'] == 'video' else p['text']"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaVA folder with the files of its processor."""
    folder = tmp_path_factory.mktemp("models") / "small-llava"
    VISION_FAMILIES["llava"].save(folder, "bfloat16")
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings |= {"size": {"height": 30, "width": 30}, "do_center_crop": False}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    write_text_files(folder)
    return folder


def write_text_files(folder: Path, more: Sequence[str] = (), template: str = TEMPLATE) -> Tokenizer:
    """A tokenizer of bytes with an image token, and with `more` behind it; and a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<pad>", "<s>", "</s>", *letters, *(f"<unused_{i}>" for i in range(PLACEHOLDER - 259))]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = (*names[:3], "<image>", *more)
    tokenizer.add_special_tokens([AddedToken(n, special=True) for n in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "chat_template.jinja").write_text(template)
    return tokenizer


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(str(folder), "--media-domain", "allowed.test", log=log) as s:
        yield s


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[octavo.LLM]:
    with octavo.LLM(str(folder), memory="1GiB", threads=1) as llm:
        yield llm


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


SQUARE = drawing(("square", "green", (10, 10, 90, 90)))
CIRCLE = drawing(("circle", "red", (60, 40, 140, 120)))


def ask(server: Server, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    status, reply = server.post(
        CHAT, {"messages": messages, "temperature": 0, "max_tokens": 12, **more}
    )
    assert status == 200, reply
    return reply


def said(llm: octavo.LLM, messages: list[dict[str, Any]]) -> str:
    return llm.chat(messages, octavo.SamplingParams(temperature=0, max_tokens=12))[0].text


ABOUT = "What color is the circle?"


def test_openai_client(server: Server, llm: octavo.LLM) -> None:
    """The same answer whole, streamed and in Python, which another picture changes."""
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="x")
    given: Any = {
        "model": "small-llava",
        "messages": shown(CIRCLE, text=ABOUT),
        "temperature": 0,
        "max_tokens": 12,
    }
    whole = client.chat.completions.create(**given)
    answer = whole.choices[0].message.content
    details = json.loads(whole.model_dump_json())["usage"]["prompt_tokens_details"]
    assert details["image_tokens"] == IMAGE_TOKENS
    stream = client.chat.completions.create(**given, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == answer
    assert answer == said(llm, shown(CIRCLE, text=ABOUT)) != said(llm, shown(SQUARE, text=ABOUT))
    given["messages"] = shown(CIRCLE[:90], text="?")
    with pytest.raises(openai.BadRequestError, match="is a damaged or truncated image file") as e:
        client.chat.completions.create(**given)
    assert e.value.param == "messages[0].content[0].image_url"


def test_langchain(server: Server, llm: octavo.LLM) -> None:
    client = ChatOpenAI(
        base_url=server.url + "/v1", api_key="x", model="small-llava", temperature=0, max_tokens=12
    )  # type: ignore[arg-type, call-arg]
    messages = shown(SQUARE, CIRCLE, text="Compare.")
    assert client.invoke(messages).content == said(llm, messages)


def test_a_second_question(server: Server) -> None:
    """Of one image: its encoder does not run again, and its prompt begins in the prefix cache."""
    first = shown(drawing(("square", "blue", (20, 30, 90, 100))), text=ABOUT)
    answer = ask(server, first)["choices"][0]["message"]
    before = server.metric("octavo_images_encoded_total")
    again = ask(server, [*first, answer, {"role": "user", "content": "And now?"}])
    assert server.metric("octavo_images_encoded_total") == before
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= IMAGE_TOKENS


def test_python_api(llm: octavo.LLM, tmp_path: Path) -> None:
    """A PIL.Image, a file's bytes, its path and a data: URL of one picture: one answer."""
    (tmp_path / "a.png").write_bytes(CIRCLE)
    pictures = (Image.open(io.BytesIO(CIRCLE)), CIRCLE, tmp_path / "a.png")
    parts = [{"type": "image", "image": picture} for picture in pictures]
    answers = {said(llm, shown(CIRCLE, text=ABOUT))}
    for part in parts:
        content = [part, {"type": "text", "text": ABOUT}]
        answers.add(said(llm, [{"role": "user", "content": content}]))
    assert len(answers) == 1


@pytest.mark.parametrize("name", ["llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_from_a_file_to_the_answer(name: str, tmp_path: Path) -> None:
    """Log-probabilities after a portrait in a file are those of transformers; low detail takes
    fewer tokens where the family has a choice."""
    family, seed = VISION_FAMILIES[name], 1
    model, tokenizer = family.save(tmp_path), write_text_files(tmp_path)
    file = io.BytesIO()
    picture(seed).save(file, "PNG")
    with octavo.LLM(str(tmp_path), memory="2GiB", threads=1, kv_dtype="f32") as llm:
        params = octavo.SamplingParams(temperature=0, max_tokens=5, logprobs=0, ignore_eos=True)
        (found,) = llm.chat(shown(file.getvalue(), text=ABOUT), params)
        low = shown(drawing(size=(600, 400)), text=ABOUT)
        low[0]["content"][0]["image_url"]["detail"] = "low"
        (few,) = llm.chat(low, params)
    image = family.image(seed)
    text = "user: " + "<image>" * image.tokens + ABOUT + "assistant: "
    ids = tokenizer.encode(text).ids
    assert found.prompt_tokens == len(ids)
    most = 26 if name == "llava_next" else 24
    assert few.prompt_tokens == len(ids) - image.tokens + most
    logits = torch.from_numpy(family.logits(model, ids + list(found.tokens), [seed]))
    expected = logits.log_softmax(-1)[len(ids) - 1 : -1]
    drawn = [float(row[token]) for row, token in zip(expected, found.tokens, strict=True)]
    assert np.abs(np.array(drawn) - found.logprobs).max() < 2e-3
    assert (expected.max(-1).values.numpy() - drawn).max() < 4e-3


def test_chat_command(llm: octavo.LLM, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(CIRCLE)
    given = [str(folder), "-p", ABOUT, "--temperature", "0", "--max-tokens", "12", "--image"]
    shows = CliRunner().invoke(chat, [*given, str(tmp_path / "a.png")])
    assert shows.stdout.rstrip("\n") == said(llm, shown(CIRCLE, text=ABOUT)).rstrip("\n")
    missing = CliRunner().invoke(chat, [*given, str(tmp_path / "b.png")])
    assert "No such file or directory" in str(missing.exception)


def test_image_in_a_conversation(tmp_path: Path) -> None:
    """/image shows a picture with the next message only."""
    (tmp_path / "a.png").write_bytes(CIRCLE)
    conversation = Conversation()
    assert "cannot read" in conversation.command("/image", "nowhere.png")
    assert "name a file" in conversation.command("/image", "")
    assert "a.png goes with" in conversation.command("/image", str(tmp_path / "a.png"))
    assert "name a file: /video clip.mp4" in conversation.command("/video", "")
    conversation.ask("first")
    conversation.ask("second")
    first, second = (m["content"] for m in conversation.messages)
    assert [p["type"] for p in first] == ["image", "text"] and second == "second"
    assert "saved 2 messages" in conversation.command("/save", str(tmp_path / "talk.json"))


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

    before = [round_() for _ in range(4)][-1]  # by then every thread has what it keeps
    assert [round_() for _ in range(4)][-1] - before < 32 << 20
