"""Videos over HTTP, as vLLM's and OpenAI's clients send them, to a small Qwen2.5-VL."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from click.testing import CliRunner

import octavo
from octavo.cli.chat import chat
from octavo.errors import RequestError, UsageError
from tests.api.server import Server, serving
from tests.api.test_images import CHAT, VIDEO_TEMPLATE, VIDEO_TOKENS, data_url, write_text_files
from tests.unit.test_video_files import file_of, moving, saved
from tests.vision_models import VISION_FAMILIES

FRAMES = [file_of(f) for f in moving(4)]
ANIMATION = saved(moving(4), "PNG", 500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small-qwen"
    VISION_FAMILIES["qwen2_5_vl"].save(folder, "bfloat16")
    write_text_files(folder, VIDEO_TOKENS, VIDEO_TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(str(folder), log=tmp_path_factory.mktemp("server") / "log") as s:
        yield s


def asked(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part, {"type": "text", "text": "What moves?"}]}]


FORMS: list[dict[str, Any]] = [
    {"type": "video_url", "video_url": {"url": data_url(ANIMATION).replace("image/", "video/a")}},
    {"type": "video", "video": [data_url(f) for f in FRAMES]},
    {"type": "video", "video": data_url(ANIMATION)},
    {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + ",".join(
        data_url(f).partition(",")[2] for f in FRAMES)}, "fps": 2},
]  # fmt: skip


def test_openai_client(server: Server, folder: Path) -> None:
    """One video in each of its forms: one answer, that of Python; another rate is another prompt."""
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="x")
    given: dict[str, Any] = {"model": "small-qwen", "temperature": 0, "max_tokens": 12}
    answers, counts = set(), set()
    for part in FORMS:
        reply: Any = client.chat.completions.create(messages=asked(part), **given)
        answers.add(reply.choices[0].message.content)
        usage = reply.model_dump()["usage"]
        counts.add((usage["prompt_tokens"], usage["prompt_tokens_details"]["image_tokens"]))
    assert len(answers) == len(counts) == 1
    encoded = server.metric("octavo_images_encoded_total")
    assert encoded == 2  # of four videos
    with octavo.LLM(str(folder), memory="1GiB", threads=1) as llm:
        params = octavo.SamplingParams(temperature=0, max_tokens=12)
        part = {"type": "video", "video": FRAMES, "fps": 2}
        assert {llm.chat(asked(part), params)[0].text} == answers
    slower: Any = client.chat.completions.create(messages=asked(FORMS[1] | {"fps": 0.5}), **given)
    assert server.metric("octavo_images_encoded_total") == encoded
    # "user: ", a control token and the first frames; the others are elsewhere in time
    assert slower.usage.prompt_tokens_details.cached_tokens == 6 + 1 + 15
    with pytest.raises(openai.BadRequestError, match="is a damaged or truncated image file") as e:
        broken = [data_url(FRAMES[0]), data_url(FRAMES[1][:60])]
        client.chat.completions.create(messages=asked({"type": "video", "video": broken}), **given)
    assert e.value.param == "messages[0].content[0].video[1]"


def test_refusals(server: Server) -> None:
    for part, param in (
        ({"type": "video_url", "video_url": {"url": "http://127.0.0.1:9/a.gif"}}, "video_url"),
        ({"type": "video", "video": []}, "video"),
        ({"type": "video", "video": [data_url(FRAMES[0])], "fps": -1}, "fps"),
    ):
        status, reply = server.post(CHAT, {"messages": asked(part)})
        assert (status, reply["error"]["param"]) == (400, f"messages[0].content[0].{param}")


def test_a_template_without_videos(folder: Path, tmp_path: Path) -> None:
    """Is refused, not silently shown nothing."""
    shutil.copytree(folder, tmp_path / "m")
    template = tmp_path / "m" / "chat_template.jinja"
    template.write_text(template.read_text().replace("<begin><video><end>", ""))
    with octavo.LLM(str(tmp_path / "m"), memory="1GiB", threads=1) as llm:
        with pytest.raises(RequestError, match="shows 0 of 1 images and videos"):
            llm.chat(asked({"type": "video", "video": FRAMES}))


def test_chat_command(folder: Path, tmp_path: Path) -> None:
    """--video FILE is what the same part answers in Python; models without videos say so."""
    file = tmp_path / "a.png"
    file.write_bytes(ANIMATION)
    given = ["-p", "What moves?", "--temperature", "0", "--max-tokens", "12", "--video", str(file)]
    found = CliRunner().invoke(chat, [str(folder), *given])
    with octavo.LLM(str(folder), memory="1GiB", threads=1) as llm:
        params = octavo.SamplingParams(temperature=0, max_tokens=12)
        wanted = llm.chat(asked({"type": "video", "video": file}), params)[0].text
    assert found.stdout.rstrip("\n") == wanted.rstrip("\n") and wanted
    refused = CliRunner().invoke(chat, ["tiny-vlm", "--offline", *given])
    assert isinstance(refused.exception, UsageError)
    assert "--video: tiny-vlm takes no videos" in str(refused.exception)
