"""Videos that requests bring: forms, animations, hostile files."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from octavo.errors import RequestError
from octavo.generate.media import MediaPolicy, read_media
from octavo.text.messages import read_messages
from octavo.vision.animation import decode_animation
from octavo.vision.qwen2_vl import Qwen2VLPreprocessor
from octavo.vision.qwen_video import Qwen2VideoPreprocessor, QwenFrames
from tests.unit.test_media import animation, chunk, data_url, file, png, refused_soon

AT = "messages[0].content[0].video"
IMAGES = Qwen2VLPreprocessor("<i>", 7, 8, 24, 256, 24 * 64, 3)
VIDEOS = Qwen2VideoPreprocessor("<v>", 8, QwenFrames(8, 24, 256, 24 * 64, 3))
MODEL: Any = SimpleNamespace(images=IMAGES, videos=VIDEOS)


def read(video: Any, model: Any = MODEL, **more: Any) -> Any:
    kind = "video_url" if isinstance(video, str | dict) else "video"
    parts = [{"type": kind, kind: video, **more}]
    (found,) = read_media(read_messages([{"role": "user", "content": parts}]), model)
    return found


def refused(video: Any, **more: Any) -> RequestError:
    with pytest.raises(RequestError) as e:
        read(video, **more)
    assert str(e.value.param).startswith("messages[0].content[0].") and e.value.status == 400
    assert "0x" not in str(e.value) and len(str(e.value)) < 300
    return e.value


def moving(count: int) -> list[Image.Image]:
    """A white square that moves over black."""
    out = []
    for i in range(count):
        pixels = np.zeros((24, 40, 3), np.uint8)
        pixels[8:16, i : i + 8] = 255
        out.append(Image.fromarray(pixels))
    return out


def saved(frames: list[Image.Image], kind: str, duration: int, **more: Any) -> bytes:
    out = io.BytesIO()
    frames[0].save(out, kind, save_all=True, append_images=frames[1:], duration=duration, **more)
    return out.getvalue()


LOSSLESS: dict[str, dict[str, Any]] = {"GIF": {}, "PNG": {}, "WEBP": {"lossless": True}}


@pytest.mark.parametrize("kind", LOSSLESS)
def test_animations(kind: str) -> None:
    """Frames and times of a file, and those that are shown of it, two a second."""
    frames = moving(20)
    data = saved(frames, kind, 100, **LOSSLESS[kind])
    clip = decode_animation(data, "")
    assert (clip.count, clip.sampled) == (20, False) and abs(clip.rate - 10) < 1e-9
    for number, image in zip((0, 7, 19), clip.decode((0, 7, 19)), strict=True):
        assert np.array_equal(np.asarray(image), np.asarray(frames[number]))
    shown = read(data_url(data, f"image/{kind.lower()}"))
    listed = read([data_url(file_of(frames[n])) for n in (0, 5, 10, 15)])
    assert [i.digest for i in shown.images] == [i.digest for i in listed.images]
    assert len(read(data_url(data), fps=5).images) == 5
    still = decode_animation(file(kind), "")
    assert still.count == 1 and len(list(still.decode([0]))) == 1


def file_of(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def test_a_still_before_an_animation() -> None:
    """In a PNG file, for readers that know no animations; it is no frame."""
    frames = moving(3)
    data = saved(frames, "PNG", 500, default_image=True)
    clip = decode_animation(data, "")
    assert clip.count == 2 and clip.rate == 2.0
    (first,) = clip.decode([0])
    assert np.array_equal(np.asarray(first), np.asarray(frames[1]))


def test_lists_of_frames(tmp_path: Path) -> None:
    """URLs, bytes, paths and pictures, and vLLM's list in one URL: the same input."""
    frames = [file_of(f) for f in moving(3)]
    (tmp_path / "a.png").write_bytes(frames[2])
    first = read([data_url(f) for f in frames])
    mixed = read([frames[0], Image.open(io.BytesIO(frames[1])), tmp_path / "a.png"])
    joined = ",".join(base64.b64encode(f).decode() for f in frames)
    url = "data:video/jpeg;base64," + joined
    for other in (mixed, read(url), read({"url": url})):
        assert [i.digest for i in other.images] == [i.digest for i in first.images]
    assert [i.shape[0] for i in first.images] == [2, 2]
    assert np.array_equal(first.images[1].array[0], first.images[1].array[1])  # the last, again
    assert [(i.time, i.last) for i in first.images] == [(0, False), (1, True)]


GIF = data_url(animation("GIF", 3), "image/gif")
FORMS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "nothing": (None, {}, "video holds no video"),
    "number": (3, {}, "video holds no video"),
    "no frames": ([], {}, "0 frames"),
    "too many": ([GIF] * 769, {}, "769 frames; 1 to 768"),
    "a frame that is none": ([file(), b"GIF89a"], {}, r"video\[1\] is a damaged"),
    "an animation in a list": ([animation("GIF", 3)], {}, r"video\[0\] is an animation"),
    "other sizes": ([file(), file(size=(10, 20))], {}, "frame 1 has 10 x 20 pixels, the first 20 x 10"),
    "a frame elsewhere": ([file(), "http://127.0.0.1:9/a"], {}, r"video\[1\]: frames are not fetched"),
    "commas": ("data:video/jpeg;base64," + "," * (1 << 20), {}, "769 frames; 1 to 768"),
    "a path": ("/etc/passwd", {}, "no URL of video"),
    "a host": ("http://127.0.0.1:9/a.gif", {}, "video_url"),
    "a text": ("data:text/plain;base64,YQ==", {}, "not data:video"),
    "base64": ("data:video/gif;base64,Y*==", {}, "base64"),
    "no video": (data_url(b"%PDF-1.7", "video/mp4"), {}, "no GIF"),
    "fps of 0": (GIF, {"fps": 0}, "fps is 0"),
    "fps of a word": (GIF, {"fps": "2"}, "fps is 2"),
    "lines": ([file(size=(1, 300))], {}, "1 x 300 pixels"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    video, more, message = FORMS[form]
    with pytest.raises(RequestError, match=message):
        read(video, **more)
    refused(video, **more)


def test_number_of_videos() -> None:
    parts = [{"type": "video_url", "video_url": GIF}] * 5
    messages = read_messages([{"role": "user", "content": parts}])
    assert len(read_media(messages[:1], MODEL, MediaPolicy(videos=5))) == 5
    with pytest.raises(RequestError, match="5 videos; 4 at most") as e:
        read_media(messages, MODEL)
    assert e.value.param == "messages[0].content[4].video_url"


@pytest.mark.parametrize(
    ("images", "message"), [(IMAGES, "takes no videos"), (None, "takes text only")]
)
def test_models_without_videos(images: Any, message: str) -> None:
    error = refused(GIF, model=SimpleNamespace(images=images, videos=None))
    assert message in str(error)
    assert (error.param, error.code) == ("messages[0].content[0].type", "unsupported_parameter")


def apng(frames: int, width: int) -> bytes:
    """A file that says it has frames, and has none."""
    control = chunk(b"acTL", frames.to_bytes(4) + bytes(4))
    each = b"".join(
        chunk(b"fcTL", i.to_bytes(4) + width.to_bytes(4) * 2 + bytes(14)) for i in range(frames)
    )
    return png(width, width, 8, 2, control + each)


HOSTILE = {
    "gif frames": lambda: animation("GIF", 10_000),
    "png pixels": lambda: apng(300, 4000),
    "png frames": lambda: apng(100_000, 1),
    "gif head": lambda: b"GIF89a" + b"\xff" * 32,
    "gif blocks": lambda: b"GIF89a\1\0\1\0\0\0\0" + b"\x21\xfe\1\0\0" * (1 << 20),
    "webp chunks": lambda: animation("WEBP", 3) + b"aaaa\0\0\0\0" * (1 << 20),
    "png chunks": lambda: animation("PNG", 3) + chunk(b"aaAa", b"") * (1 << 20),
    "truncated gif": lambda: animation("GIF", 3)[:60],
    "truncated webp": lambda: animation("WEBP", 3)[:90],
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(name: str) -> None:
    """Refused by what the file says."""
    refused_soon(HOSTILE[name](), refused)


def test_pixels_in_all() -> None:
    """More than fit are refused before the second frame is decoded."""
    large = Qwen2VideoPreprocessor("<v>", 8, QwenFrames(28, 4096, 3136, 12845056, 3))
    model = SimpleNamespace(images=IMAGES, videos=large)
    frame = file(size=(1600, 1200))
    assert len(read([frame] * 2, model=model).images) == 1
    error = refused([frame] + [b"never looked at"] * 99, model=model)
    assert "100 frames become 1,596 x 1,204 pixels" in str(error)
