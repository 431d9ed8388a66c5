"""Which preprocessor a model has, from its files."""

from __future__ import annotations

from octavo.checkpoint import Checkpoint
from octavo.errors import CheckpointError
from octavo.text import Tokenizer
from octavo.vision.gemma3 import Gemma3Preprocessor
from octavo.vision.idefics3 import Idefics3Preprocessor
from octavo.vision.llava import LlavaPreprocessor
from octavo.vision.normalize import processor_settings
from octavo.vision.preprocess import Preprocessor
from octavo.vision.resize import Framing, number, pair

BILINEAR, LANCZOS = 2, 1
IDEFICS3_SIDE = 364


def load_preprocessor(
    checkpoint: Checkpoint, tokenizer: Tokenizer, *, family: str, placeholder: int, tokens: int,
    size: int,
) -> Preprocessor:  # fmt: skip
    """What makes pictures fit an encoder. Raises CheckpointError.

    placeholder: the token whose embeddings an image's replace, `tokens` of them a tile of `size`
    pixels a side.
    """
    settings, name = processor_settings(checkpoint), checkpoint.path.name
    token = tokenizer.name(placeholder)
    if not token:
        raise CheckpointError(f"{name}: the tokenizer has no token {placeholder} for images")
    if family == "idefics3":
        longest = settings.get("size", {}).get("longest_edge", 4 * IDEFICS3_SIDE)
        side = settings.get("max_image_size", {}).get("longest_edge", IDEFICS3_SIDE)
        _same((side, side), size, name)
        return Idefics3Preprocessor(
            token, placeholder, tokens,
            longest=number(longest, "size") if settings.get("do_resize", True) else 0,
            side=number(side, "max_image_size"),
            resample=number(settings.get("resample", LANCZOS), "resample", 5),
            splits=bool(settings.get("do_image_splitting", True)),
        )  # fmt: skip
    if family == "gemma3":
        begin, end = (
            tokenizer.name(checkpoint.metadata.get(key, default))
            for key, default in (("boi_token_index", 255_999), ("eoi_token_index", 256_000))
        )
        framing = Framing(
            size=pair(settings.get("size", 224), "size"),
            resample=number(settings.get("resample", BILINEAR), "resample", 5),
        )
        _same(framing.fixed, size, name)
        return Gemma3Preprocessor(begin, placeholder, token, end, tokens, framing)
    framing = Framing.of(settings)
    _same(framing.fixed, size, name)
    return LlavaPreprocessor(token, placeholder, tokens, framing)


def _same(found: tuple[int, int], size: int, name: str) -> None:
    if found != (size, size):
        raise CheckpointError(
            f"{name}: pictures become {found[1]} x {found[0]}, its encoder takes {size} x {size}"
        )
