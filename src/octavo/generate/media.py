"""The pictures and videos of a conversation: where they come from, and what a model makes of them.

Decoding takes long and much memory, so that few threads do it, and none of it on an event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from octavo.errors import InvalidValue, RequestError
from octavo.generate.fetch import Fetcher
from octavo.generate.model import ServedModel
from octavo.generate.request import GenerationRequest
from octavo.generate.sources import load_source
from octavo.generate.videos import read_video
from octavo.text.messages import ImagePart, Message, VideoPart, text_only
from octavo.vision.decode import decode_image, to_rgb, upright
from octavo.vision.preprocess import Processed, read_detail

if TYPE_CHECKING:
    from PIL.Image import Image

THREADS = 2


@dataclass(frozen=True)
class MediaPolicy:
    """images, videos: most of a request. fetcher: of those that are given by URL."""

    images: int = 16
    videos: int = 4
    fetcher: Fetcher = field(default_factory=Fetcher)


class MediaReader:
    """Reads the pictures and videos of requests in threads of its own."""

    def __init__(self, policy: MediaPolicy | None = None) -> None:
        self._policy = policy or MediaPolicy()
        self._threads = ThreadPoolExecutor(THREADS, "octavo-media")  # they start with the first

    async def read(self, request: GenerationRequest, model: ServedModel) -> GenerationRequest:
        """The request with its media ready for the model. Raises RequestError."""
        messages = request.messages or ()
        if not any(m.media for m in messages):
            return request
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._threads, read_media, messages, model, self._policy)
        return replace(request, media=await work)


def read_media(
    messages: Sequence[Message], model: ServedModel, policy: MediaPolicy | None = None
) -> list[Processed]:
    """The pictures and videos of all messages, as a model takes them. Raises RequestError."""
    parts, policy = [p for m in messages for p in m.media], policy or MediaPolicy()
    if not parts:
        return []
    if model.images is None:
        at, _, kind = parts[0].at.rpartition(".")
        raise text_only(at, kind)
    images = [p for p in parts if isinstance(p, ImagePart)]
    videos = [p for p in parts if isinstance(p, VideoPart)]
    if videos and model.videos is None:
        at, _, kind = videos[0].at.rpartition(".")
        raise RequestError(
            f"{at}: this model takes no videos; send some frames as images", f"{at}.type",
            "unsupported_parameter",
        )  # fmt: skip
    _check_count(images, policy.images, "images")
    _check_count(videos, policy.videos, "videos")
    return [
        _video(part, model, policy) if isinstance(part, VideoPart) else _image(part, model, policy)
        for part in parts
    ]


def _check_count(parts: Sequence[ImagePart | VideoPart], most: int, what: str) -> None:
    if len(parts) > most:
        at = parts[most].at
        raise InvalidValue(f"{at}: {len(parts):,} {what}; {most} at most", at)


def _image(part: ImagePart, model: ServedModel, policy: MediaPolicy) -> Processed:
    assert model.images is not None
    source, at, detail = part.source, part.at, None
    if isinstance(part.source, Mapping):
        source, detail = part.source.get("url"), part.source.get("detail")
    level = read_detail(detail, model.images, at)
    return model.images(_still(source, policy, at), level, at)


def _video(part: VideoPart, model: ServedModel, policy: MediaPolicy) -> Processed:
    assert model.videos is not None
    return read_video(
        part, model.videos, policy.fetcher, lambda source, at: _still(source, policy, at)
    )


def _still(source: Any, policy: MediaPolicy, at: str) -> Image:
    """One picture, decoded. Raises RequestError."""
    source = load_source(source, policy.fetcher, at)
    if isinstance(source, bytes):
        return decode_image(source, at)
    if hasattr(source, "getbands"):  # a PIL.Image, whose package may not be here
        return to_rgb(upright(source))
    raise InvalidValue(f"{at} holds no image: {type(source).__name__}", at)
