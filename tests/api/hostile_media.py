"""Hostile media as requests bring them: each case with what must become of it.

Rows S60 to S67 are those of issue 18. {inside} stands for the port of a host that is never visited.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import random
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image

from tests.api.test_images import drawing
from tests.unit.test_fetch import URLS
from tests.unit.test_media import EXIF_PART, animation, chunk, png, webp_header

CHAT = "/v1/chat/completions"
PART = "messages[0].content[0]"
AT = PART + ".image_url"
QUESTION = {"type": "text", "text": "What color is the circle?"}
CIRCLE = drawing(("circle", "red", (60, 40, 140, 120)))
NO_FORMAT = "is no PNG, JPEG, WebP or GIF file"
BROKEN = "is a damaged or truncated image file"
UNPICKLED = Path(tempfile.gettempdir()) / f"unpickled-{os.getpid()}"


@dataclass(frozen=True)
class Case:
    """bodies: one after the other, each answered alike. said: in the answer's text or the error's
    message. param: what the error names."""

    row: str
    name: str
    bodies: Callable[[], list[bytes]]
    status: int
    said: str
    param: str | None = AT
    path: str = CHAT

    @property
    def id(self) -> str:
        return f"{self.row} {self.name}"


def asked(part: Any, **more: Any) -> bytes:
    body = {"messages": [{"role": "user", "content": [part, QUESTION]}], "max_tokens": 8}
    return json.dumps(body | more).encode()


def by_url(*urls: str) -> list[bytes]:
    return [asked({"type": "image_url", "image_url": {"url": url}}) for url in urls]


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def files(*each: bytes) -> list[bytes]:
    return by_url(*map(data_url, each))


def saved(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def circle(mode: str = "RGB") -> Image.Image:
    return Image.open(io.BytesIO(CIRCLE)).convert(mode)


def plain(*size: int) -> bytes:
    return saved(Image.new("RGB", size, "white"))


def noise(width: int, height: int) -> bytes:
    """A PNG of as many bytes as pixels take."""
    pixels = random.Random(0).randbytes(3 * width * height)
    return saved(Image.frombytes("RGB", (width, height), pixels))


@cache
def bomb() -> bytes:
    return png(40_000, 40_000, 1, 0, chunk(b"IDAT", zlib.compress(bytes(5001 * 40_000), 1)))


def inflating(name: bytes, head: bytes) -> bytes:
    """8 x 8 pixels beside 200 MB that are compressed into 200 kB."""
    more = chunk(name, head + zlib.compress(bytes(200 << 20), 9))
    return png(8, 8, 8, 2, more + chunk(b"IDAT", zlib.compress(bytes(8 * 25))))


def turned() -> Iterator[bytes]:
    """As EXIF data say in eight ways, and in one that means nothing."""
    for orientation in range(1, 10):
        exif = Image.Exif()
        exif[0x0112] = orientation
        yield saved(circle(), "JPEG", exif=exif)


def truncated() -> Iterator[bytes]:
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        whole = saved(Image.effect_noise((64, 48), 90).convert("RGB"), kind)
        yield from (whole[: len(whole) * sixteenth // 16] for sixteenth in range(16))


class Touch:
    """What touches a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (UNPICKLED,)


def pickled() -> str:
    return base64.b64encode(pickle.dumps(Touch())).decode()


def embedded(kind: str) -> list[bytes]:
    return [asked({"type": kind, kind: pickled()})]


def in_dialect(path: str) -> list[bytes]:
    """The bomb as others than OpenAI's chat say it."""
    data = base64.b64encode(bomb()).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    said: dict[str, Any] = {
        "/v1/messages": {"content": [{"type": "image", "source": source}]},
        "/api/chat": {"content": "?", "images": [data]},
    }
    least = {"max_tokens": 8} if path == "/v1/messages" else {}
    body = {"model": "tiny-vlm", "messages": [{"role": "user", **said[path]}], **least}
    return [json.dumps(body).encode()]


OUTSIDE = "http://allowed.test"
MARKDOWN = "look ![](http://127.0.0.1:{inside}/x) <img src='http://127.0.0.1:{inside}/y'> <image>"
LARGE = "40,000 x 40,000 pixels"
CASES = [
    Case("S61", "name that is never looked up", lambda: by_url("http://hanging.test/circle.png"), 400, "took over 5 seconds"),
    Case("S61", "slow host", lambda: by_url(OUTSIDE + "/slow"), 400, "took over 5 seconds"),
    Case("S60", "addresses inside", lambda: by_url(*(u.replace("PORT", "{inside}") for u in URLS)), 400, AT),
    Case("S60", "allowed host that is inside", lambda: by_url("http://localhost:{inside}/"), 400, "localhost is no public host"),
    Case("S60", "redirect inside", lambda: by_url(OUTSIDE + "/redirect"), 400, "its host answered 302"),
    Case("S60", "other schemes", lambda: by_url("file:///etc/passwd", "/etc/passwd", "ftp://allowed.test/", "gopher://allowed.test/"), 400, "is no URL of image files"),
    Case("S60", "allowed host", lambda: by_url(OUTSIDE + "/circle.png"), 200, "red"),
    Case("S61", "endless file", lambda: by_url(OUTSIDE + "/endless"), 400, "has over 20,971,520 bytes"),
    Case("S61", "more than was declared", lambda: by_url(OUTSIDE + "/more"), 400, BROKEN),
    Case("S61", "compressed answer", lambda: by_url(OUTSIDE + "/compressed"), 400, "its host sent it compressed"),
    Case("S61", "file of 20 MB", lambda: by_url(OUTSIDE + "/noise.png"), 200, ""),
    Case("S62", "addresses in a text", lambda: [asked({"type": "text", "text": MARKDOWN})], 200, ""),
    Case("S63", "PNG bomb", lambda: files(bomb()), 400, LARGE),
    Case("S63", "PNG bomb, Anthropic", lambda: in_dialect("/v1/messages"), 400, LARGE, path="/v1/messages"),
    Case("S63", "PNG bomb, Ollama", lambda: in_dialect("/api/chat"), 400, LARGE, path="/api/chat"),
    Case("S63", "WebP bombs", lambda: files(webp_header(16_383, 16_383), b"RIFF\0\0\0\0WEBPVP8L\0\0\0\0\x2f" + b"\xff" * 40), 400, "pixels; up to 25,165,824"),
    Case("S63", "inflating parts of a PNG", lambda: files(inflating(b"zTXt", b"a\0\0"), inflating(b"iCCP", b"a\0\0")), 400, BROKEN),
    Case("S63", "pixels beyond the last", lambda: files(inflating(b"IDAT", b"")), 200, ""),
    Case("S63", "10,000 frames", lambda: files(animation("GIF", 10_000)), 400, "is an animation"),
    Case("S63", "millions of parts", lambda: files(b"\xff\xd8" + b"\xff\xfe\0\2" * (1 << 20), png(8, 8, 8, 2, chunk(b"aaAa", b"") * (1 << 18)), b"GIF89a\1\0\1" + bytes(1 << 22), b"\xff\xd8" + EXIF_PART * (1 << 17)), 400, BROKEN),
    Case("S63", "other formats", lambda: files(saved(circle(), "JPEG2000"), saved(circle(), "TIFF"), saved(circle(), "BMP"), saved(circle(), "ICO"), saved(circle(), "EPS"), saved(circle(), "PDF"), b"<svg xmlns='http://www.w3.org/2000/svg'/>"), 400, NO_FORMAT),
    Case("S63", "largest picture", lambda: files(plain(5016, 5016)), 200, "none"),
    Case("S63", "largest file in a body", lambda: files(noise(1400, 1400)), 200, ""),
    Case("S63", "20 MB in a body", lambda: files(noise(2600, 2600)), 413, "the body is longer than 8388608 bytes", None),
    Case("S64", "lines and dots", lambda: files(plain(1, 1), plain(1, 20_000), plain(20_000, 1)), 200, "none"),
    Case("S64", "picture of nothing", lambda: files(png(0, 10, 8, 2, b""), png(10, 0, 8, 2, b""), png(30, 30, 8, 2, b"")), 400, BROKEN),
    Case("S64", "colors of all kinds", lambda: files(saved(circle("CMYK"), "JPEG"), saved(circle("RGBA")), saved(circle("P"), transparency=0), saved(circle("P"), "GIF")), 200, "red"),
    Case("S64", "greys of all kinds", lambda: files(saved(circle("1")), saved(circle("L")), saved(circle("LA")), saved(circle("I").point(lambda v: v * 257).convert("I;16"))), 200, "black"),
    Case("S64", "turned by EXIF", lambda: files(*turned()), 200, "red"),
    Case("S64", "animations", lambda: files(animation("GIF", 3), animation("PNG", 3), animation("WEBP", 3)), 400, "is an animation"),
    Case("S64", "truncated at each sixteenth", lambda: files(*truncated()), 400, AT),
    Case("S64", "polyglots", lambda: files(*(CIRCLE + tail for tail in (b"PK\3\4" + bytes(64), b"%PDF-1.7", b"<script>alert(1)</script>"))), 200, "red"),
    Case("S65", "bytes without a meaning", lambda: files(random.Random(0).randbytes(4096), bytes(4 << 20), b"\x89PNG\r\n\x1a\n" + random.Random(0).randbytes(4096)), 400, AT),
    Case("S65", "broken data: URLs", lambda: by_url("", "data:image/png;base64", "data:image/png,abc", "data:text/plain;base64,YQ==", "data:image/" + "a" * (1 << 20) + ";base64,YQ=="), 400, AT),
    Case("S65", "broken base64", lambda: by_url(*("data:image/png;base64," + text for text in ("YQ=", "Y*==", " YQ==", "\u00e9"))), 400, "is not valid base64"),
    Case("S65", "50 MiB of A", lambda: by_url("data:image/png;base64," + "A" * (50 << 20)), 413, "8388608 at most", None),
    Case("S66", "10,000 pictures", lambda: [json.dumps({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(plain(1, 1))}}] * 10_000}]}).encode()], 400, "10,000 images; 16 at most", "messages[0].content[16].image_url"),
    Case("S66", "more pixels by request", lambda: [asked(QUESTION, mm_processor_kwargs={"max_pixels": 10**9})], 400, "mm_processor_kwargs", "mm_processor_kwargs"),
    Case("S67", "sound", lambda: [asked({"type": "input_audio", "input_audio": {"data": pickled(), "format": "wav"}})], 400, "is of type 'input_audio'", PART + ".type"),
    Case("S67", "videos", lambda: [asked({"type": "video_url", "video_url": {"url": "data:video/mp4;base64," + pickled()}})], 400, "takes no videos", PART + ".type"),
    Case("S67", "embeddings of pictures", lambda: embedded("image_embeds"), 400, "is not supported here", PART + ".image_embeds"),
    Case("S67", "embeddings as a part", lambda: embedded("prompt_embeds"), 400, "is not supported here", PART + ".prompt_embeds"),
    Case("S67", "embeddings of a prompt", lambda: [json.dumps({"prompt": "a", "prompt_embeds": pickled()}).encode()], 400, "is not supported here", "prompt_embeds", "/v1/completions"),
]  # fmt: skip
