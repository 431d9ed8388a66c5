"""Qwen-VL's videos: some frames of each second, all of one size, as many together as a patch of the
tower is made of.

Qwen2-VL and Qwen2.5-VL have the tokens of all frames one after the other, and place them along an
axis of time; Qwen3-VL writes the time before each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from octavo.errors import InvalidValue
from octavo.vision.clip import Clip
from octavo.vision.decode import MAX_PIXELS
from octavo.vision.image import ImageInput, Pixels
from octavo.vision.preprocess import Processed
from octavo.vision.qwen2_vl import check_proportions, fitted
from octavo.vision.resize import Size, resized

MOST_PIXELS = 2 * MAX_PIXELS  # of all frames, resized
FILLED = 0.9  # of the share of tokens that Qwen2-VL's frames have together


@dataclass(frozen=True)
class QwenFrames:
    """Which frames are shown, and how they are resized.

    side: pixels a side of a token. most: tokens of the frames of a patch. shortest, longest: the
    fewest and the most pixels of a frame, or of all of Qwen3-VL's together. depth: frames of a
    patch. rate: frames a second. fewest, frames: of a video. share: tokens that bound a frame's
    pixels further (cap_pixels_per_frame), 0 if they do not.
    """

    side: int
    most: int
    shortest: int
    longest: int
    resample: int
    depth: int = 2
    rate: float = 2.0
    fewest: int = 4
    frames: int = 768
    share: int = 0

    def numbers(self, clip: Clip, choose: Callable[[float, int], list[int]], at: str) -> list[int]:
        """Of the frames that are shown; `choose` has how many the rate asks for, and of how many.
        Raises InvalidValue."""
        found = list(range(clip.count))
        if not clip.sampled:
            found = choose(clip.count / clip.rate * (clip.wanted or self.rate), clip.count)
        if len(found) > self.frames:
            raise InvalidValue(f"{at} has {len(found):,} frames; {self.frames:,} at most", at)
        return found

    def patches(
        self, clip: Clip, shown: Sequence[int], size: Callable[[int, int, int], Size], at: str
    ) -> tuple[list[Pixels], Size]:
        """The frames, resized, by patches, the last repeated to fill one, and their size before.
        size: what becomes of so many frames of a height and width. Raises RequestError."""
        images = clip.decode(shown)
        first = next(images)
        before = (first.height, first.width)
        check_proportions(*before, at)
        whole = len(shown) + -len(shown) % self.depth
        height, width = size(max(len(shown), self.depth), *before)
        tokens = height * width // self.side**2
        if tokens > self.most or whole * height * width > MOST_PIXELS:
            raise InvalidValue(
                f"{at}: {whole:,} frames become {width:,} x {height:,} pixels; up to "
                f"{MOST_PIXELS:,} pixels in all, and {self.most:,} tokens for {self.depth} frames, "
                "are taken: send fewer or smaller ones", at,
            )  # fmt: skip
        made: list[Pixels] = []
        for number, image in zip(shown, chain([first], images), strict=True):
            if (image.height, image.width) != before:
                raise InvalidValue(
                    f"{at}: frame {number} has {image.width:,} x {image.height:,} pixels, the "
                    f"first {before[1]:,} x {before[0]:,}", at,
                )  # fmt: skip
            made.append(resized(image, (height, width), self.resample, at))
        made += [made[-1]] * (whole - len(made))
        return [np.stack(made[i : i + self.depth]) for i in range(0, whole, self.depth)], before


@dataclass(frozen=True)
class Qwen2VideoPreprocessor:
    """pace: positions a second along the axis of time; 0: one a patch, however long it lasts."""

    placeholder: str
    token: int
    framing: QwenFrames
    pace: float = 0.0

    @property
    def frames(self) -> int:
        return self.framing.frames

    def __call__(self, clip: Clip, at: str) -> Processed:
        f = self.framing
        shown = f.numbers(clip, self._choose, at)
        made, before = f.patches(clip, shown, self._size, at)
        rate = clip.rate if clip.sampled else len(shown) / clip.count * clip.rate
        # In fp32, as the reference has the seconds of a patch.
        step = np.float32(self.pace) * np.float32(f.depth / rate) if self.pace else np.float32(1)
        each = made[0].shape[1] * made[0].shape[2] // f.side**2
        images = tuple(
            ImageInput.of(
                pixels, before, each, time=int(np.float32(i) * step), last=i == len(made) - 1
            )
            for i, pixels in enumerate(made)
        )
        return Processed(self.placeholder * each * len(made), images)

    def _choose(self, wanted: float, count: int) -> list[int]:
        """Whole patches of frames, at even distances, from the first on."""
        f = self.framing
        most = min(f.frames, count) // f.depth * f.depth
        number = int(min(max(wanted, f.fewest), most)) // f.depth * f.depth
        return [i * count // number for i in range(number)] if number else list(range(count))

    def _size(self, count: int, height: int, width: int) -> Size:
        f = self.framing
        longest = f.longest
        if f.share:
            room = int(f.share * f.side**2 * FILLED) * f.depth // count
            longest = max(min(longest, room), int(f.shortest * 1.05))
        return fitted(height, width, f.side, f.shortest, min(longest, f.most * f.side**2))


@dataclass(frozen=True)
class Qwen3VideoPreprocessor:
    """begin, pad, end: the tokens of a patch of frames; the time comes before. placeholder: what
    the template writes for all of that."""

    begin: str
    pad: str
    end: str
    token: int
    framing: QwenFrames

    @property
    def placeholder(self) -> str:
        return f"{self.begin}{self.pad}{self.end}"

    @property
    def frames(self) -> int:
        return self.framing.frames

    def __call__(self, clip: Clip, at: str) -> Processed:
        f = self.framing
        shown = f.numbers(clip, self._choose, at)
        made, before = f.patches(clip, shown, self._size, at)
        each = made[0].shape[1] * made[0].shape[2] // f.side**2
        seconds = [number / clip.rate for number in shown]
        seconds += [seconds[-1]] * (-len(seconds) % f.depth)
        middles = [
            (seconds[i] + seconds[i + f.depth - 1]) / 2 for i in range(0, len(seconds), f.depth)
        ]
        text = f"{self.begin}{self.pad * each}{self.end}"
        return Processed(
            "".join(f"<{middle:.1f} seconds>{text}" for middle in middles),
            tuple(ImageInput.of(pixels, before, each, time=0) for pixels in made),
        )

    def _choose(self, wanted: float, count: int) -> list[int]:
        """At even distances from the first to the last."""
        f = self.framing
        number = min(max(int(wanted), f.fewest), f.frames, count)
        return [int(n) for n in np.linspace(0, count - 1, number).round()]

    def _size(self, count: int, height: int, width: int) -> Size:
        """As the frames have so many pixels together."""
        f, side = self.framing, self.framing.side
        longest = f.longest
        if f.share:
            frame = max(min(f.share * side**2, longest // count), int(f.shortest * 1.05))
            longest = frame * count
        if height < side or width < side:
            scale = max(side / height, side / width)
            height, width = int(height * scale), int(width * scale)
        even = round(count / f.depth) * f.depth  # which rounds halves to even, as the reference
        longest = min(longest, f.most * side**2 * even)
        return fitted(height, width, side, f.shortest, longest, count, even)
