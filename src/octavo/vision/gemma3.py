"""Gemma 3's pictures: stretched to a square, between tokens that begin and end an image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.vision.preprocess import Detail, Processed
from octavo.vision.resize import Framing

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Gemma3Preprocessor:
    """placeholder: also begins an image; soft: its image tokens; end: ends it."""

    placeholder: str
    token: int
    soft: str
    end: str
    tokens: int
    framing: Framing
    details: tuple[Detail, ...] = ()

    def __call__(self, image: Image, detail: Detail, at: str) -> Processed:
        text = f"\n\n{self.placeholder}{self.soft * self.tokens}{self.end}\n\n"
        return Processed(text, (self.framing.tile(image, self.tokens, at),))
