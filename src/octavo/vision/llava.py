"""LLaVA 1.5's pictures: framed as CLIP's processor does, one tile each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.vision.preprocess import Detail, Processed
from octavo.vision.resize import Framing

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class LlavaPreprocessor:
    """tokens: placeholders of a picture."""

    placeholder: str
    token: int
    tokens: int
    framing: Framing
    details: tuple[Detail, ...] = ()

    def __call__(self, image: Image, detail: Detail, at: str) -> Processed:
        return Processed(
            self.placeholder * self.tokens, (self.framing.tile(image, self.tokens, at),)
        )
