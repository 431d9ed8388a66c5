"""Compressed videos (MP4, MOV, WebM, MKV), with PyAV where it is installed: how many frames they
have is counted before any is decoded."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

from octavo.errors import InvalidValue
from octavo.vision.animation import MOST_FRAMES, check_frames
from octavo.vision.clip import Clip
from octavo.vision.decode import MAX_PIXELS, broken_file, check_area

if TYPE_CHECKING:
    from PIL.Image import Image

MATROSKA = b"\x1aE\xdf\xa3"
CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4")  # of the hundreds that FFmpeg would try
LIMITS = {"max_pixels": str(MAX_PIXELS), "threads": "1"}  # of frames, whatever a header says
MOST_STREAMS = 8  # in which FFmpeg looks for what their headers leave out


def movie_format(data: bytes) -> str | None:
    """FFmpeg's name of a file's format, by its first bytes; None if it is none of these."""
    if data[4:8] == b"ftyp":
        return "mp4"
    return "matroska" if data.startswith(MATROSKA) else None


def decode_movie(data: bytes, at: str, wanted: float | None = None) -> Clip:
    """The first video in a file. wanted: frames a second that are shown. Raises RequestError naming
    `at`."""
    with _opened(data, at) as (container, stream):
        rate = float(stream.average_rate or 0)
        packets = (p for p in container.demux(stream) if p.size)
        count = sum(1 for _ in islice(packets, MOST_FRAMES + 1))
        width, height = stream.codec_context.width, stream.codec_context.height
    check_frames(count, width, height, at)
    if not count or not rate > 0:
        raise broken_file(at, "video")

    def decode(numbers: Sequence[int]) -> Iterator[Image]:
        left = iter(numbers)
        number = next(left, None)
        with _opened(data, at) as (container, stream):
            for i, frame in enumerate(container.decode(stream)):
                if (frame.width, frame.height) != (width, height):
                    break
                if i == number:
                    yield frame.to_image()
                    if (number := next(left, None)) is None:
                        return
        raise broken_file(at, "video")

    return Clip(count, rate, decode, wanted=wanted)


@contextmanager
def _opened(data: bytes, at: str) -> Iterator[tuple[Any, Any]]:
    """The file and its first video, whose header has been checked. Raises RequestError."""
    try:
        import av
    except ImportError:
        raise InvalidValue(
            f"{at} is a compressed video, which PyAV reads: pip install 'octavo[video]'; or send "
            "its frames as a list", at,
        ) from None  # fmt: skip
    try:
        # Of no other format: some would have FFmpeg read what a file names.
        with av.open(
            io.BytesIO(data), format=movie_format(data), stream_options=[LIMITS] * MOST_STREAMS
        ) as container:
            if not container.streams.video:
                raise InvalidValue(f"{at} has no video in it", at)
            stream = container.streams.video[0]
            codec = stream.codec_context
            name = codec.name if codec else "nothing known"
            if name not in CODECS:
                raise InvalidValue(
                    f"{at} is compressed as {name[:20]}; {', '.join(CODECS)} are taken", at
                )
            check_area(codec.width, codec.height, at)
            codec.thread_count = 1
            codec.options = LIMITS
            yield container, stream
    except (av.FFmpegError, ValueError, MemoryError) as e:
        raise broken_file(at, "video") from e
