"""The pictures and videos of a conversation: where they come from, and what a model makes of them.

Decoding takes long and much memory, so that few threads do it, and none of it on an event loop.
Hosts may take long to answer, so that other threads wait for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.errors import InvalidValue, RequestError
from octavo.generate.fetch import Fetcher
from octavo.generate.model import ServedModel
from octavo.generate.request import GenerationRequest
from octavo.generate.sources import is_remote, load_source
from octavo.generate.videos import read_video
from octavo.text.messages import ImagePart, Message, VideoPart, text_only
from octavo.vision.decode import decode_image, to_rgb, upright
from octavo.vision.preprocess import Detail, Processed, read_detail

if TYPE_CHECKING:
    from PIL.Image import Image

Medium = ImagePart | VideoPart
THREADS = 2
FETCHES = 8  # at a time, each with a file of up to 20 MiB until it is decoded


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
        self._decoding = ThreadPoolExecutor(THREADS, "octavo-media")  # they start with the first
        self._fetching = ThreadPoolExecutor(FETCHES, "octavo-fetch")
        self._fetches = asyncio.Semaphore(FETCHES)

    async def read(self, request: GenerationRequest, model: ServedModel) -> GenerationRequest:
        """The request with its media ready for the model. Raises RequestError."""
        parts = _media_of(request.messages or ())
        if not parts:
            return request
        _check(parts, model, self._policy)
        return replace(request, media=[await self._read(part, model) for part in parts])

    async def _read(self, part: Medium, model: ServedModel) -> Processed:
        url = _url(part)
        if not is_remote(url):
            return await self._decoded(part, model)
        async with self._fetches:  # until it is decoded: few files are in memory
            loop, fetch = asyncio.get_running_loop(), self._policy.fetcher.fetch
            file = await loop.run_in_executor(self._fetching, fetch, url, part.at)
            source = {**part.source, "url": file} if isinstance(part.source, Mapping) else file
            return await self._decoded(msgspec.structs.replace(part, source=source), model)

    async def _decoded(self, part: Medium, model: ServedModel) -> Processed:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._decoding, _processed, part, model, self._policy)


def read_media(
    messages: Sequence[Message], model: ServedModel, policy: MediaPolicy | None = None
) -> list[Processed]:
    """The pictures and videos of all messages, as a model takes them. Raises RequestError."""
    parts, policy = _media_of(messages), policy or MediaPolicy()
    _check(parts, model, policy)
    return [_processed(part, model, policy) for part in parts]


def _media_of(messages: Sequence[Message]) -> list[Medium]:
    return [part for message in messages for part in message.media]


def _url(part: Medium) -> Any:
    """What may be a URL."""
    return part.source.get("url") if isinstance(part.source, Mapping) else part.source


def _check(parts: Sequence[Medium], model: ServedModel, policy: MediaPolicy) -> None:
    """Raises RequestError for kinds and details that the model does not take, and for too many."""
    images = [p for p in parts if isinstance(p, ImagePart)]
    videos = [p for p in parts if isinstance(p, VideoPart)]
    if parts and model.images is None:
        at, _, kind = parts[0].at.rpartition(".")
        raise text_only(at, kind)
    if videos and model.videos is None:
        at, _, kind = videos[0].at.rpartition(".")
        raise RequestError(
            f"{at}: this model takes no videos; send some frames as images", f"{at}.type",
            "unsupported_parameter",
        )  # fmt: skip
    _check_count(images, policy.images, "images")
    _check_count(videos, policy.videos, "videos")
    for part in images:
        _detail(part, model)


def _check_count(parts: Sequence[Medium], most: int, what: str) -> None:
    if len(parts) > most:
        at = parts[most].at
        raise InvalidValue(f"{at}: {len(parts):,} {what}; {most} at most", at)


def _processed(part: Medium, model: ServedModel, policy: MediaPolicy) -> Processed:
    """Raises RequestError."""
    if isinstance(part, VideoPart):
        return _video(part, model, policy)
    return _image(part, model, policy)


def _image(part: ImagePart, model: ServedModel, policy: MediaPolicy) -> Processed:
    assert model.images is not None
    detail = _detail(part, model)
    return model.images(_still(_url(part), policy, part.at), detail, part.at)


def _detail(part: ImagePart, model: ServedModel) -> Detail:
    assert model.images is not None
    given = part.source.get("detail") if isinstance(part.source, Mapping) else None
    return read_detail(given, model.images, part.at)


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
