"""Pictures from Pillow's memory, resized and cut into rows, beside Pillow and numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from octavo import _native
from octavo.vision.normalize import Normalization
from octavo.vision.resize import centered, pixels_of, resized
from tests.vision_models import normalized

FILTERS = [1, 2, 3, 4, 5]  # lanczos, bilinear, bicubic, box, hamming
HOW = Normalization(1 / 255, (0.48, 0.46, 0.41), (0.27, 0.26, 0.28))


def noise(height: int, width: int, seed: int) -> np.ndarray:
    """Bytes as they come, or of both ends alone, where sums leave the range of a byte."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return pixels if seed % 2 else (pixels >> 7) * np.uint8(255)


def by_pillow(pixels: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    resized = Image.fromarray(pixels).resize((width, height), Image.Resampling(resample))
    return np.asarray(resized)


sides = st.one_of(st.integers(1, 12), st.integers(1, 260))


@pytest.mark.parametrize("isa", _native.isas())
@given(sides, sides, sides, sides, st.sampled_from(FILTERS), st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_resizing(
    isa: str, height: int, width: int, down: int, across: int, resample: int, seed: int
) -> None:
    """Every byte is Pillow's, whatever the sizes."""
    pixels = noise(height, width, seed)
    found = _native.resize_picture(isa, pixels, down, across, resample)
    assert np.array_equal(found, by_pillow(pixels, down, across, resample))


ORDERS = {  # heights and widths before and after
    "width first": ((300, 220), (200, 100)),
    "just width first": ((300, 220), (260, 200)),
    "just height first": ((300, 220), (259, 200)),
    "height first": ((900, 40), (30, 39)),
    "wider and lower": ((300, 20), (200, 90)),
    "taps of half a picture": ((1, 60_000), (1, 2)),
    "a column": ((60_000, 1), (2, 1)),
}


@pytest.mark.parametrize("resample", FILTERS)
@pytest.mark.parametrize("order", ORDERS)
def test_order_of_passes(order: str, resample: int) -> None:
    """Bytes are rounded between both passes, so that their order shows."""
    before, after = ORDERS[order]
    pixels = noise(*before, 3)
    found = resized(Image.fromarray(pixels), after, resample, "image")
    assert np.array_equal(found, by_pillow(pixels, *after, resample))


def test_orders_differ() -> None:
    """The cases above would show a wrong order."""
    pixels = noise(300, 220, 3)
    first = _native.resize_picture("", pixels, 300, 200, 3)
    other = _native.resize_picture("", first, 259, 200, 3)
    assert not np.array_equal(other, _native.resize_picture("", pixels, 259, 200, 3))


def test_nearest() -> None:
    pixels = noise(37, 53, 1)
    found = resized(pixels, (20, 90), 0, "image")
    assert np.array_equal(found, by_pillow(pixels, 20, 90, 0))


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (640, 480), (2100, 2100), (5, 900_000)], ids=str)
def test_pixels_of(size: tuple[int, int]) -> None:
    """Of pictures in one block of Pillow's memory, and in several."""
    pixels = noise(*size, 1)
    assert np.array_equal(pixels_of(Image.fromarray(pixels)), pixels)


@pytest.mark.parametrize("size", [(8, 8), (7, 12), (12, 7), (3, 4), (30, 5), (5, 31)], ids=str)
@pytest.mark.parametrize("to", [(8, 8), (5, 4)], ids=str)
def test_centered(size: tuple[int, int], to: tuple[int, int]) -> None:
    pixels = noise(*size, 1)
    top, left = (size[0] - to[0]) // 2, (size[1] - to[1]) // 2
    wanted = Image.fromarray(pixels).crop((left, top, left + to[1], top + to[0]))
    assert np.array_equal(centered(pixels, to), np.asarray(wanted))


@pytest.mark.parametrize(("frames", "apart"), [(1, 0), (2, 0), (2, 12)])
def test_patches(frames: int, apart: int) -> None:
    """Bit for bit what transformers' arithmetic makes of each square."""
    pixels, side = np.stack([noise(12, 20, 1), noise(12, 20, 3)]), 4
    places = [(y, x) for y in (8, 0, 5) for x in (0, 16, 3)]
    first = np.array([-1] + [20 * y + x for y, x in places], np.int32)
    found = HOW.patches(pixels, first, side, frames, apart)
    values = normalized(pixels, HOW)
    assert not found[0].any()
    for row, (y, x) in zip(found[1:], places, strict=True):
        shown = values[[0, 1] if apart else [0] * frames, y : y + side, x : x + side]
        assert np.array_equal(row, shown.transpose(3, 0, 1, 2).ravel())


def test_what_cannot_be() -> None:
    pixels = noise(4, 5, 1)
    table = HOW.table
    for wrong in (
        ("", pixels, 0, 3, 3),
        ("", pixels, 3, 3, 6),
        ("", pixels[..., :2].copy(), 3, 3, 3),
    ):
        with pytest.raises(ValueError):
            _native.resize_picture(*wrong)
    for first, side, frames, apart in (
        (17, 1, 1, 0),
        (0, 5, 1, 0),
        (20, 1, 1, 0),
        (0, 2, 2, 3),
        (0, 0, 1, 0),
    ):
        with pytest.raises(ValueError):
            _native.cut_patches(
                pixels, np.array([first], np.int32), side + (first == 17), frames, apart, table
            )
    with pytest.raises(ValueError):
        _native.rgb_pixels([Image.new("L", (4, 4)).__arrow_c_array__()[1]], 4)
    with pytest.raises(ValueError):
        _native.rgb_pixels([Image.new("RGB", (4, 4)).__arrow_c_array__()[1]], 3)
