"""Which preprocessor a model has, from its files."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any

from octavo.checkpoint import Checkpoint
from octavo.errors import CheckpointError
from octavo.text import Tokenizer
from octavo.vision.gemma3 import Gemma3Preprocessor
from octavo.vision.idefics3 import Idefics3Preprocessor
from octavo.vision.llava import LlavaPreprocessor
from octavo.vision.llava_next import SIZES, LlavaNextPreprocessor, Tiling
from octavo.vision.normalize import processor_settings
from octavo.vision.preprocess import Preprocessor
from octavo.vision.qwen2_vl import Qwen2VLPreprocessor, pixel_limits
from octavo.vision.resize import BICUBIC, Framing, number, pair

BILINEAR, LANCZOS = 2, 1
IDEFICS3_SIDE = 364


def load_preprocessor(
    checkpoint: Checkpoint, tokenizer: Tokenizer, *, family: str, placeholder: int, tokens: int,
    size: int,
) -> Preprocessor:  # fmt: skip
    """What makes pictures fit an encoder. Raises CheckpointError.

    placeholder: the token whose embeddings an image's replace, `tokens` of them a tile of `size`
    pixels a side; or at most so many an image, each for a square of that size.
    """
    settings, name = processor_settings(checkpoint), checkpoint.path.name
    token = tokenizer.name(placeholder)
    if not token:
        raise CheckpointError(f"{name}: the tokenizer has no token {placeholder} for images")
    if family == "idefics3":
        longest = _longest(settings, "size", 4 * IDEFICS3_SIDE)
        side = _longest(settings, "max_image_size", IDEFICS3_SIDE)
        _same((side, side), size, name)
        return Idefics3Preprocessor(
            token, placeholder, tokens,
            longest=longest if settings.get("do_resize", True) else 0,
            side=side,
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
    if family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        return _qwen2_vl(settings, name, token, placeholder, tokens, size)
    framing = Framing.of(settings)
    if family == "llava_next":
        return _llava_next(settings, checkpoint, framing, token, placeholder, tokens, size)
    _same(framing.fixed, size, name)
    return LlavaPreprocessor(token, placeholder, tokens, framing)


def _qwen2_vl(
    settings: Mapping[str, Any], name: str, token: str, placeholder: int, tokens: int, size: int
) -> Qwen2VLPreprocessor:
    patch, merge = settings.get("patch_size", 14), settings.get("merge_size", 2)
    side = number(patch, "patch_size") * number(merge, "merge_size")
    _same((side, side), size, name)
    if not settings.get("do_resize", True):
        raise CheckpointError(f"{name}: this image processor resizes nothing")
    resample = number(settings.get("resample", BICUBIC), "resample", 5)
    limits = pixel_limits(settings)
    return Qwen2VLPreprocessor(token, placeholder, side, tokens, *limits, resample)


def _llava_next(
    settings: Mapping[str, Any], checkpoint: Checkpoint, framing: Framing, token: str,
    placeholder: int, tokens: int, size: int,
) -> LlavaNextPreprocessor:  # fmt: skip
    name, metadata = checkpoint.path.name, checkpoint.metadata
    scaled = framing.size or (framing.shortest, framing.shortest)
    for found in (scaled, framing.crop or scaled):
        _same(found, size, name)
    sizes = settings.get("image_grid_pinpoints") or SIZES
    if sizes != (metadata.get("image_grid_pinpoints") or SIZES):
        raise CheckpointError(f"{name}: image_grid_pinpoints are not those of its processor")
    tiling = Tiling.of(metadata, size, isqrt(tokens))
    return LlavaNextPreprocessor(token, placeholder, tiling, framing.resample)


def _longest(settings: Mapping[str, Any], key: str, default: int) -> int:
    given = settings.get(key)
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise CheckpointError(f"{key} of the image processor is {str(given)[:40]}")
    return number(given.get("longest_edge", default), key)


def _same(found: tuple[int, int], size: int, name: str) -> None:
    if found != (size, size):
        raise CheckpointError(
            f"{name}: pictures become {found[1]} x {found[0]}, its encoder takes {size} x {size}"
        )
