"""Compressed videos: what PyAV reads of them, beside transformers, and hostile files."""

from __future__ import annotations

import base64
import io
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from transformers.video_utils import load_video

from octavo.errors import RequestError
from octavo.vision import movie
from octavo.vision.movie import decode_movie, movie_format
from tests.unit.test_media import refused_soon
from tests.unit.test_video_files import moving, read, refused

KINDS = {"mp4": "mpeg4", "mov": "libx264", "webm": "libvpx", "matroska": "mpeg4"}


def written(
    kind: str = "mp4", codec: str = "mpeg4", frames: list[Image.Image] | None = None, rate: Any = 10
) -> bytes:
    """A file with these frames, 20 if none are given."""
    out = io.BytesIO()
    frames = moving(20) if frames is None else frames
    with av.open(out, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p" if codec != "mjpeg" else "yuvj420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
    return out.getvalue()


def url(data: bytes) -> str:
    return "data:video/mp4;base64," + base64.b64encode(data).decode()


@pytest.mark.parametrize("kind", KINDS)
def test_frames(kind: str, tmp_path: Path) -> None:
    """Their number, their rate and every pixel of them are those that transformers reads."""
    data = written(kind, KINDS[kind])
    clip = decode_movie(data, "")
    assert (clip.count, clip.rate, clip.sampled) == (20, 10.0, False)
    (tmp_path / "a").write_bytes(data)
    # Its reader asks WebM and MKV files for a number of frames that they do not have.
    wanted = [f.to_ndarray(format="rgb24") for f in av.open(io.BytesIO(data)).decode(video=0)]
    if kind in ("mp4", "mov"):
        theirs, about = load_video(str(tmp_path / "a"), backend="pyav")
        assert (about.total_num_frames, about.fps) == (20, 10.0)
        assert np.array_equal(theirs, np.stack(wanted))
    assert np.array_equal(np.stack([np.asarray(f) for f in clip.decode(range(20))]), wanted)
    some = [np.asarray(f) for f in clip.decode((0, 7, 19))]
    assert np.array_equal(some, [wanted[n] for n in (0, 7, 19)])


def test_shown(tmp_path: Path) -> None:
    """Two frames a second unless the request says how many, as of an animation with these frames."""
    data = written()
    (tmp_path / "a.mp4").write_bytes(data)
    frames = list(decode_movie(data, "").decode((0, 5, 10, 15)))
    listed = [i.digest for i in read(frames).images]
    for given in (url(data), {"url": url(data)}, data, tmp_path / "a.mp4"):
        assert [i.digest for i in read(given).images] == listed
    assert len(read(url(data), fps=5).images) == 5


def test_rates() -> None:
    """Of seconds that frames are no whole number of."""
    clip = decode_movie(written(rate=Fraction(30000, 1001)), "")
    assert clip.rate == float(Fraction(30000, 1001))


def test_without_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is told what to install, or to send frames."""
    monkeypatch.setitem(sys.modules, "av", None)
    error = refused(url(written_before()))
    assert "pip install 'octavo[video]'" in str(error) and "frames as a list" in str(error)


def written_before() -> bytes:
    return b"\0\0\0\x18ftypmp42" + b"\0" * 64


def growing() -> bytes:
    """A file whose later frames are larger than its header says, as VP8's may be."""
    out, packets = io.BytesIO(), []
    for size in ((40, 24), (80, 48)):
        encoder = av.CodecContext.create("libvpx", "w")
        encoder.width, encoder.height = size
        encoder.pix_fmt, encoder.time_base = "yuv420p", Fraction(1, 10)
        for _ in range(5):
            packets += encoder.encode(av.VideoFrame.from_image(Image.new("RGB", size)))
        packets += encoder.encode()
    with av.open(out, "w", format="webm") as container:
        stream = container.add_stream("libvpx", rate=10)
        stream.width, stream.height, stream.pix_fmt = 40, 24, "yuv420p"
        for at, packet in enumerate(packets):
            packet.pts = packet.dts = at
            packet.time_base, packet.stream = Fraction(1, 10), stream
            container.mux(packet)
    return out.getvalue()


HOSTILE = {
    "mp4 head": written_before,
    "webm head": lambda: movie.MATROSKA + b"\0" * 64,
    "truncated": lambda: written()[: len(written()) // 2],
    "truncated webm": lambda: written("webm", "libvpx")[:400],
    "zeros": lambda: written()[:48] + bytes(len(written()) - 48),
    "no frames": lambda: written("matroska", frames=[Image.new("RGB", (40, 24))])[:350],
    "frames": lambda: written("matroska", frames=[Image.new("RGB", (16, 16))] * 4200, rate=60),
    "another codec": lambda: written("matroska", "mjpeg"),
    "large": lambda: written(frames=[Image.new("RGB", (6000, 4400))]),
    "larger than it says": growing,
    "no video": lambda: b"\x1aE\xdf\xa3" + written()[4:],
    "playlist": lambda: b"\0\0\0\x18ftyp" + b"#EXTM3U\nfile:///etc/passwd\n" * 9,
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(name: str) -> None:
    refused_soon(HOSTILE[name](), refused)


def test_damage_behind_the_header() -> None:
    """Whatever bytes are changed, a file is read or refused."""
    data, rng = written("mov", "libx264"), np.random.default_rng(1)
    refusals = 0
    for _ in range(60):
        changed = bytearray(data)
        for at in rng.integers(40, len(data), 12):
            changed[at] = int(rng.integers(256))
        try:
            read(url(bytes(changed)))
        except RequestError as e:
            assert e.status == 400
            refusals += 1
    assert 0 < refusals


def test_formats() -> None:
    assert (
        movie_format(written()) == "mp4" and movie_format(written("webm", "libvpx")) == "matroska"
    )
    assert movie_format(b"GIF89a") is None
