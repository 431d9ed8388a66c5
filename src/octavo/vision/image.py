"""An image that is ready for an encoder. Also travels between processes."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]


class ImageInput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Pixels of one image, resized, cropped and padded, but not normalised: encoders do that.

    pixels: 8 bits a channel, `[tiles, height, width, 3]` (`shape`), where tiles are an image's
    parts or a video's frames. size: height and width of the picture before it was resized. tokens:
    consecutive placeholders that it fills in a prompt. digest: sha256 of all of that. time: None
    for a picture; for frames of a video, how many positions after its first ones they are. last:
    whether what follows in the prompt comes after these, or goes on from the same position.
    """

    pixels: bytes
    shape: tuple[int, int, int, int]
    size: tuple[int, int]
    tokens: int
    digest: bytes
    time: int | None = None
    last: bool = True

    @classmethod
    def of(
        cls, pixels: npt.NDArray[Any], size: tuple[int, int], tokens: int, settings: bytes = b"",
        *, time: int | None = None, last: bool = True,
    ) -> ImageInput:  # fmt: skip
        """pixels: uint8 `[tiles, height, width, 3]`. settings: what else the encoder's result
        depends on."""
        if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[3] != 3:
            raise ValueError(f"pixels are {pixels.dtype} {list(pixels.shape)}")
        tiles, height, width, _ = pixels.shape
        data = np.ascontiguousarray(pixels).tobytes()
        digest = hashlib.sha256(repr(((tiles, height, width), size, tokens, settings)).encode())
        digest.update(data)
        return cls(
            pixels=data, shape=(tiles, height, width, 3), size=size, tokens=tokens,
            digest=digest.digest(), time=time, last=last,
        )  # fmt: skip

    @property
    def key(self) -> int:
        """What prefixes know its tokens by: a number below 0 of its content and its place."""
        place = b"" if self.time is None else repr((self.time, self.last)).encode()
        return -1 - int.from_bytes(hashlib.sha256(self.digest + place).digest())

    @property
    def array(self) -> Pixels:
        """The pixels in their shape, without a copy."""
        return np.frombuffer(self.pixels, np.uint8).reshape(self.shape)
