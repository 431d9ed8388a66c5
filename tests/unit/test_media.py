"""Pictures that requests bring: forms of URLs, and hostile files."""

from __future__ import annotations

import base64
import gc
import io
import itertools
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from PIL import Image

from octavo.errors import RequestError
from octavo.generate.media import MediaPolicy, read_media
from octavo.text.messages import read_messages
from octavo.vision.decode import most_pieces
from octavo.vision.llava import LlavaPreprocessor
from octavo.vision.resize import Framing

AT = "messages[0].content[0].image_url"
MODEL: Any = SimpleNamespace(images=LlavaPreprocessor("<image>", 7, 4, Framing(size=(28, 28))))


def file(kind: str = "PNG", size: tuple[int, int] = (20, 10), **options: Any) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (250, 20, 20)).save(out, kind, **options)
    return out.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def read(*urls: Any, policy: MediaPolicy | None = None, model: Any = MODEL) -> list[Any]:
    parts = [{"type": "image_url", "image_url": url} for url in urls]
    return read_media(read_messages([{"role": "user", "content": parts}]), model, policy)


def refused(url: Any, policy: MediaPolicy | None = None) -> RequestError:
    with pytest.raises(RequestError) as e:
        read(url, policy=policy)
    assert str(e.value.param).startswith(AT) and AT in str(e.value)
    assert e.value.status == 400 and "0x" not in str(e.value) and len(str(e.value)) < 300
    return e.value


def test_pictures_are_read() -> None:
    (a, b) = read({"url": data_url(file())}, data_url(file("JPEG"), "image/jpeg;charset=x"))
    assert a.text == b.text == "<image>" * 4
    assert a.images[0].shape == (1, 28, 28, 3) and a.images[0].size == (10, 20)
    assert {tuple(p) for p in a.images[0].array.reshape(-1, 3)} == {(250, 20, 20)}
    assert a.images[0].digest != read(data_url(file(size=(10, 20))))[0].images[0].digest
    assert read(data_url(file()))[0].images[0].digest == a.images[0].digest


def test_pictures_in_python(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(file())
    parts = [{"type": "image", "image": v} for v in (path, file(), Image.open(io.BytesIO(file())))]
    found = read_media(read_messages([{"role": "user", "content": parts}]), MODEL)
    assert len({f.images[0].digest for f in found}) == 1 and len(found) == 3


FORMS: dict[str, Any] = {
    "nothing": None,
    "number": 3,
    "empty": "",
    "no comma": "data:image/png;base64",
    "no base64": "data:image/png,abc",
    "text": "data:text/plain;base64,YQ==",
    "padding": "data:image/png;base64,YQ=",
    "alphabet": "data:image/png;base64,Y*==",
    "spaces": "data:image/png;base64, YQ==",
    "empty file": "data:image/png;base64,",
    "random": data_url(bytes(range(256)) * 16),
    "zeros": "data:image/png;base64," + "A" * (1 << 20),
    "long type": "data:image/" + "a" * (1 << 20) + ";base64,YQ==",
    "file": "file:///etc/passwd",
    "path": "/etc/passwd",
    "ftp": "ftp://host/a.png",
    "gopher": "gopher://host/",
    "relative": "//127.0.0.1/a.png",
    "no url": {"detail": "auto"},
    "pdf": data_url(b"%PDF-1.7\n" + b"0" * 100),
    "svg": data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"),
    "eps": data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n"),
    "tiff": data_url(file("TIFF")),
    "bmp": data_url(file("BMP")),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    refused(FORMS[form])


@pytest.mark.parametrize("detail", ["low", "high", "huge", 3])
def test_detail(detail: Any) -> None:
    """LLaVA has one resolution."""
    assert refused({"url": data_url(file()), "detail": detail}).param == AT + ".detail"
    assert read({"url": data_url(file()), "detail": "auto"})


def test_number_of_images() -> None:
    assert len(read(*[data_url(file())] * 16)) == 16
    with pytest.raises(RequestError, match="10,000 images; 16 at most") as e:
        read(*["data:image/png;base64,AAAA"] * 10_000)
    assert e.value.param == "messages[0].content[16].image_url"


def test_models_of_text() -> None:
    with pytest.raises(RequestError, match="takes text only") as e:
        read(data_url(file()), model=SimpleNamespace(images=None))
    assert (e.value.param, e.value.code) == ("messages[0].content[0].type", "unsupported_parameter")


# -- hostile files ----------------------------------------------------------------------------


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, depth: int, color: int, body: bytes) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + body + chunk(b"IEND", b"")


def animation(kind: str, frames: int) -> bytes:
    out = io.BytesIO()
    pictures = [Image.new("RGB", (8, 8), (i * 90 % 256, i // 256, 0)) for i in range(frames)]
    pictures[0].save(out, kind, save_all=True, append_images=pictures[1:])
    return out.getvalue()


def webp_header(width: int, height: int) -> bytes:
    body = b"VP8X" + struct.pack("<I", 10) + b"\0" * 4
    body += (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


HOSTILE = {
    "png bomb": lambda: png(40_000, 40_000, 1, 0, chunk(b"IDAT", zlib.compress(bytes(5001 * 40_000), 1))),
    "png of nothing": lambda: png(0, 10, 8, 2, chunk(b"IDAT", zlib.compress(b""))),
    "png of no body": lambda: png(30, 30, 8, 2, b""),
    "webp bomb": lambda: webp_header(16_383, 16_383),
    "lossless webp bomb": lambda: b"RIFF\0\0\0\0WEBPVP8L\0\0\0\0\x2f" + b"\xff" * 40,
    "gif frames": lambda: animation("GIF", 10_000),
    "png frames": lambda: animation("PNG", 3),
    "webp frames": lambda: animation("WEBP", 3),
    "jpeg head": lambda: b"\xff\xd8\xff\xe0" + b"\0" * 64,
    "gif head": lambda: b"GIF89a" + b"\xff" * 32,
    "jpeg filler": lambda: b"\xff\xd8" + b"\xff" * (1 << 23),
    "jpeg comments": lambda: b"\xff\xd8" + b"\xff\xfe\0\2" * (1 << 21),
    "png chunks": lambda: png(8, 8, 8, 2, chunk(b"aaAa", b"") * (1 << 19)),
    "gif filler": lambda: b"GIF89a\1\0\1" + bytes(1 << 22),
}  # fmt: skip


def calls(work: Callable[[], object]) -> int:
    """Functions that are called meanwhile: how much a reader in Python does."""
    count = itertools.count()
    sys.setprofile(lambda *_: next(count))
    try:
        work()
    finally:
        sys.setprofile(None)
    return next(count)


def refused_soon(data: bytes, refuse: Callable[[str], object]) -> None:
    """Without memory for pictures, and without a look at each of millions of parts."""
    url, process = data_url(data), psutil.Process()
    refuse(data_url(png(0, 1, 8, 2, b"")))  # Pillow is loaded
    before, most = process.memory_info().rss, 50 * most_pieces(data)
    assert calls(lambda: refuse(url)) < most
    gc.collect()  # the error's frames, which hold the file, refer to the error
    assert process.memory_info().rss - before < 32 << 20


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(name: str) -> None:
    """Refused by what the header says."""
    refused_soon(HOSTILE[name](), refused)


EXIF_PART = b"\xff\xe1\0\x28Exif\0\0" + bytes(32)
PHOTOSHOP = b"\xff\xed\0\x1cPhotoshop 3.0\0" + b"8BIM\0\1\0\0\0\0\0\0"


@pytest.mark.parametrize(("part", "most"), [(EXIF_PART, 64), (PHOTOSHOP, 4096)])
def test_parts_of_jpeg_files(part: bytes, most: int) -> None:
    """20 MB of them would keep Pillow for a minute, or for two seconds."""
    whole = file("JPEG")
    assert read(data_url(whole[:2] + part * most + whole[2:]))
    assert "damaged" in str(refused(data_url(whole[:2] + part * (most + 1) + whole[2:])))


@pytest.mark.parametrize("size", [(1, 1), (1, 4000), (4000, 1)], ids=str)
def test_odd_shapes(size: tuple[int, int]) -> None:
    assert read(data_url(file(size=size)))[0].images[0].shape == (1, 28, 28, 3)


def test_proportions() -> None:
    """A line whose shorter side would become 336 pixels is refused before it is resized."""
    model = SimpleNamespace(
        images=LlavaPreprocessor("<image>", 7, 4, Framing(shortest=336, crop=(336, 336)))
    )
    with pytest.raises(RequestError, match="336 x 6,720,000 pixels"):
        read(data_url(file(size=(1, 20_000))), model=model)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_truncated(kind: str) -> None:
    noise = Image.effect_noise((64, 48), 90).convert("RGB")
    out = io.BytesIO()
    noise.save(out, kind)
    whole = out.getvalue()
    for sixteenth in range(16):
        refused(data_url(whole[: len(whole) * sixteenth // 16]))
    assert read(data_url(whole))


def test_polyglots() -> None:
    """What follows a picture, or is hidden in it, is of no consequence."""
    digest = read(data_url(file()))[0].images[0].digest
    for tail in (b"PK\x03\x04" + b"\0" * 64, b"%PDF-1.7", b"<script>alert(1)</script>"):
        assert read(data_url(file() + tail))[0].images[0].digest == digest
