"""Images in the bodies of every dialect, as a gateway sees them."""

from __future__ import annotations

import json
from base64 import b64encode
from random import Random
from typing import Any

import pytest

from octavo.balance.replica import ReplicaTimes
from octavo.gateway.body import IMAGE_TOKENS, Relayed, read_outline
from octavo.gateway.media import PromptText, read_media
from octavo.gateway.upstream import DEFAULT, ModelFigures, Place
from octavo.gateway.upstreams import Upstreams

TEXT = "What is to be seen in this image? " * 40


def data(seed: int, size: int = 30_000) -> str:
    return b64encode(Random(seed).randbytes(size)).decode()


def chat(*images: str, text: str = TEXT) -> dict[str, Any]:
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{i}"}} for i in images
    ]
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": text}, *parts]}]}


def anthropic(*images: str) -> dict[str, Any]:
    parts = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": image}}
        for image in images
    ]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": TEXT}]}]}


def responses(*images: str) -> dict[str, Any]:
    parts = [{"type": "input_image", "image_url": f"data:image/jpeg;base64,{i}"} for i in images]
    return {"input": [{"role": "user", "content": [*parts, {"type": "input_text", "text": TEXT}]}]}


def ollama(*images: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": TEXT, "images": [*images]}]}


def ollama_prompt(*images: str) -> dict[str, Any]:
    return {"prompt": TEXT, "images": [*images]}


def relayed(body: dict[str, Any], salt: str = "") -> Relayed:
    written = json.dumps({"model": "m"} | body).encode()
    return Relayed("/v1/chat/completions", "", written, read_outline(written), salt)


DIALECTS = pytest.mark.parametrize("write", [chat, anthropic, responses, ollama, ollama_prompt])


@DIALECTS
def test_images_are_found_and_are_no_text(write: Any) -> None:
    one, two = relayed(write(data(1))).ask, relayed(write(data(1), data(2))).ask
    assert len(one.images) == 1 and two.images == (*one.images, *relayed(write(data(2))).ask.images)
    text = relayed(write()).ask.tokens
    assert text < one.tokens - IMAGE_TOKENS < text + 60, "its name counts, its data does not"
    assert relayed(write(data(1))).ask == one, "and the same again is the same"


def test_small_images_of_urls_are_found() -> None:
    assert len(relayed(chat(data(1, 90))).ask.images) == 1


@DIALECTS
def test_another_image_is_another_prompt(write: Any) -> None:
    one, other = relayed(write(data(1))).ask, relayed(write(data(2))).ask
    assert one.images != other.images and one.tokens == pytest.approx(other.tokens, abs=2)
    first = write in (anthropic, responses, ollama_prompt)  # in others the text comes first
    assert (one.blocks != other.blocks) == first


def test_addresses_are_images_too() -> None:
    url = "https://example.org/a.png"
    for image in ({"url": url}, url):
        part = {"type": "image_url", "image_url": image}
        body = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": TEXT}]}]}
        found = relayed(body).ask.images
        assert len(found) == 1 and found != relayed(chat(data(1))).ask.images


def test_the_text_before_an_image_is_a_prefix_as_without_it() -> None:
    plain, seen = relayed(chat()).ask.blocks, relayed(chat(data(1))).ask.blocks
    assert len(plain) == 2 and seen[:2] == plain


@pytest.mark.parametrize(
    "text",
    ["An image says more than words. " * 100, "image " + "x" * 900, "no sign of one " * 100, "a" * 5000,
     f"an image: {data(1)} is its data", "\u8bf7\u63cf\u8ff0\u8fd9\u5f20\u56fe\u7247image" * 100],
)  # fmt: skip
def test_prose_is_text(text: str) -> None:
    written = json.dumps(text).encode()
    assert read_media(written).text == written and not read_media(written).images


def test_what_is_signed_is_no_image() -> None:
    thinking = {"type": "thinking", "thinking": "", "signature": data(1)}
    body = {"messages": [{"role": "assistant", "content": [thinking]}], "prompt": "image"}
    assert len(relayed(chat(data(2)) | {"input": body}).ask.images) == 1
    written = json.dumps({"image": "", **body}).encode()
    assert read_media(written) == PromptText(written)


def test_bodies_of_many_strings_or_images_take_no_longer() -> None:
    strings = json.dumps(["image", *[""] * 1_000_000]).encode()
    assert read_media(strings) == PromptText(strings)
    many = json.dumps(["image", *(f"data:;base64,{i}" for i in range(1000))]).encode()
    assert len(read_media(many).images) == 256


def test_data_may_have_slashes_that_are_escaped() -> None:
    plain = json.dumps(chat(data(1))).replace("/", "\\/").encode()
    assert len(read_media(plain).images) == 1 and len(read_media(plain).text) < 2000


def test_requests_go_where_their_images_are_encoded() -> None:
    """Elsewhere they would have to be encoded again, as the engines say how long that takes."""
    upstreams = Upstreams()
    for name in "ab":
        up = upstreams.add(Place(f"http://{name}"))
        upstreams.up(up, {"m": ModelFigures(0, ReplicaTimes(0.001, 0.01, 0.5))}, False)

    def sent(body: dict[str, Any]) -> str:
        lease = upstreams.choose(DEFAULT, "m", relayed(body).ask).lease
        assert lease is not None
        lease.end(True)
        return lease.upstream.id

    assert sent(chat(data(1))) == "a"
    a, b = upstreams
    a.waiting, a.waiting_tokens = 1, 300
    upstreams.changed(a)
    assert sent(chat(data(2))) == "b", "where nobody waits"
    assert sent(chat(data(2), text="Something else is asked of the image. " * 40)) == "b"
    third = chat(data(1), text="And something else of the other. " * 40)
    assert sent(third) == "a", "0.3 s of waiting are less than 0.5 of encoding"
    found = {c.replica: c.cost.images for c in upstreams.explain(DEFAULT, "m", relayed(chat(data(1), data(2))).ask)}  # fmt: skip
    assert found == {"a": 500, "b": 500}
    upstreams.down(a, "gone")
    upstreams.up(a, {"m": ModelFigures(0, ReplicaTimes(0.001, 0.01, 0.5))}, False)
    found = {c.replica: c.cost.images for c in upstreams.explain(DEFAULT, "m", relayed(chat(data(1), data(2))).ask)}  # fmt: skip
    assert found == {"a": 1000, "b": 500}, "after it was down it has none"
