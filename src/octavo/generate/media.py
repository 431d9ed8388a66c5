"""The pictures of a conversation: where they come from, and what a model makes of them.

Decoding takes long and much memory, so that few threads do it, and none of it on an event loop.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo.errors import InvalidValue, RequestError
from octavo.generate.fetch import MAX_BYTES, fetch
from octavo.generate.model import ServedModel
from octavo.generate.request import GenerationRequest
from octavo.text.messages import ImagePart, Message, text_only
from octavo.vision.decode import decode_image, to_rgb, upright
from octavo.vision.preprocess import Processed, read_detail

THREADS = 2
_DATA_URL = re.compile(
    r"data:image/[\w.+-]{1,64}(;[\w.+-]{1,32}=[\w.+-]{1,64})*;base64", re.IGNORECASE | re.ASCII
)


@dataclass(frozen=True)
class MediaPolicy:
    """images: most of a request. domains: hosts that they may be fetched from."""

    images: int = 16
    domains: tuple[str, ...] = ()


class MediaReader:
    """Reads the pictures of requests in threads of its own."""

    def __init__(self, policy: MediaPolicy | None = None) -> None:
        self._policy = policy or MediaPolicy()
        self._threads = ThreadPoolExecutor(THREADS, "octavo-media")  # they start with the first

    async def read(self, request: GenerationRequest, model: ServedModel) -> GenerationRequest:
        """The request with its pictures ready for the model. Raises RequestError."""
        messages = request.messages or ()
        if not any(m.images for m in messages):
            return request
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._threads, read_images, messages, model, self._policy)
        return replace(request, pictures=await work)


def read_images(
    messages: Sequence[Message], model: ServedModel, policy: MediaPolicy | None = None
) -> list[Processed]:
    """The pictures of all messages, as a model takes them. Raises RequestError."""
    parts, policy = [p for m in messages for p in m.images], policy or MediaPolicy()
    if not parts:
        return []
    if model.images is None:
        at, _, kind = parts[0].at.rpartition(".")
        raise text_only(at, kind)
    if len(parts) > policy.images:
        at = parts[policy.images].at
        raise InvalidValue(f"{at}: {len(parts):,} images; {policy.images} at most", at)
    return [_read(part, model, policy) for part in parts]


def _read(part: ImagePart, model: ServedModel, policy: MediaPolicy) -> Processed:
    assert model.images is not None
    source, at, detail = part.source, part.at, None
    if isinstance(part.source, Mapping):
        source, detail = part.source.get("url"), part.source.get("detail")
    level = read_detail(detail, model.images, at)
    if isinstance(source, str):
        source = _by_url(source, policy, at)
    elif isinstance(source, Path):
        source = _file(source, at)
    if isinstance(source, bytes):
        image: Any = decode_image(source, at)
    elif hasattr(source, "getbands"):  # a PIL.Image, whose package may not be here
        image = to_rgb(upright(source))
    else:
        raise InvalidValue(f"{at} holds no image: {type(source).__name__}", at)
    return model.images(image, level, at)


def _by_url(url: str, policy: MediaPolicy, at: str) -> bytes:
    """A file from a data: URL, or fetched. Raises RequestError."""
    if url[:5].lower() != "data:":
        if url[:4].lower() != "http":
            raise RequestError(
                f"{at} is no URL of an image; data:image/png;base64,... is taken", at,
                "invalid_value",
            )  # fmt: skip
        return fetch(url, policy.domains, at)
    comma = url.find(",", 0, 512)
    if comma < 0 or not _DATA_URL.fullmatch(url, 0, comma):
        raise InvalidValue(f"{at} is not data:image/...;base64,...", at)
    try:
        return base64.b64decode(url[comma + 1 :], validate=True)
    except (binascii.Error, ValueError):
        raise InvalidValue(f"{at} is not valid base64", at) from None


def _file(path: Path, at: str) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as e:
        raise InvalidValue(f"{at}: {path}: {e.strerror}", at) from None
    if len(data) > MAX_BYTES:
        raise InvalidValue(f"{at} has over {MAX_BYTES:,} bytes", at)
    return data
