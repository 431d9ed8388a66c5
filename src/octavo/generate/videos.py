"""The videos of a conversation: files with an animation, or lists of frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.errors import InvalidValue, RequestError
from octavo.generate.fetch import Fetcher
from octavo.generate.sources import decoded, is_remote, load_source, split_data_url
from octavo.text.messages import VideoPart
from octavo.vision.animation import decode_animation
from octavo.vision.clip import Clip, VideoPreprocessor
from octavo.vision.movie import decode_movie, movie_format
from octavo.vision.preprocess import Processed

if TYPE_CHECKING:
    from PIL.Image import Image

FRAMES = "video/jpeg"  # vLLM's media type of several JPEG files with commas between them
LIST_RATE = 2.0  # frames a second of a list that does not say
MOST_RATE = 120.0

Still = Callable[[Any, str], "Image"]


def read_video(
    part: VideoPart, videos: VideoPreprocessor, fetcher: Fetcher, still: Still
) -> Processed:
    """A video as a model takes it. still: decodes a picture; the second argument is the field it
    came in. Raises RequestError."""
    source, at = part.source, part.at
    rate = _rate(part)
    if isinstance(source, Mapping):
        source = source.get("url")
    decode: Still = still
    if isinstance(source, str) and source[:5].lower() == "data:":
        kind, payload = split_data_url(source, at, "video")
        if kind == FRAMES:
            source = payload.split(",", videos.frames)  # one more is too many
            decode = _decoded_first(still)
        else:
            source = decoded(payload, at)
    if isinstance(source, list | tuple):
        return videos(_listed(source, rate, decode, videos.frames, at), at)
    data = load_source(source, fetcher, at, "video")
    if not isinstance(data, bytes):
        raise InvalidValue(f"{at} holds no video: {type(source).__name__}", at)
    clip = decode_movie if movie_format(data) else decode_animation
    return videos(clip(data, at, rate), at)


def _listed(frames: Sequence[Any], rate: float | None, still: Still, most: int, at: str) -> Clip:
    """A video whose frames are pictures. Raises InvalidValue."""
    if not 1 <= len(frames) <= most:
        raise InvalidValue(f"{at} has {len(frames):,} frames; 1 to {most:,} are taken", at)
    for number, frame in enumerate(frames):
        if is_remote(frame):  # so many take too long
            where = f"{at}[{number}]"
            raise InvalidValue(f"{where}: frames are not fetched; data:image/... is taken", where)

    def decode(numbers: Sequence[int]) -> Iterator[Image]:
        return (still(frames[number], f"{at}[{number}]") for number in numbers)

    return Clip(len(frames), rate or LIST_RATE, decode, sampled=True)


def _decoded_first(still: Still) -> Still:
    return lambda text, at: still(decoded(text, at), at)


def _rate(part: VideoPart) -> float | None:
    """Frames a second that are shown. Raises RequestError."""
    rate, at = part.fps, f"{part.at.rpartition('.')[0]}.fps"
    if rate is None:
        return None
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= MOST_RATE:
        raise RequestError(
            f"{at} is {str(rate)[:20]}; above 0 and up to {MOST_RATE:.0f} frames a second", at,
            "invalid_value",
        )  # fmt: skip
    return float(rate)
