"""Which preprocessor a model has for videos, from its files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.checkpoint import Checkpoint
from octavo.errors import CheckpointError
from octavo.text import Tokenizer
from octavo.vision.clip import VideoPreprocessor
from octavo.vision.normalize import Normalization, processor_settings, video_settings
from octavo.vision.qwen2_vl import pixel_limits
from octavo.vision.qwen_video import (
    Qwen2VideoPreprocessor,
    Qwen3VideoPreprocessor,
    QwenFrames,
)
from octavo.vision.resize import BICUBIC, number

# transformers' defaults
PIXELS = {"qwen3_vl": (128 << 10, 768 << 10)}
OTHER_PIXELS = 128 * 28**2, 768 * 28**2
RATE, FEWEST, MOST = 2, 4, 768  # frames
SHARES = {"qwen3_vl": 768}
OTHER_SHARE = 128_000  # tokens
BEGIN, END = 151652, 151653
PACE = 4  # positions a second


def load_video_preprocessor(
    checkpoint: Checkpoint, tokenizer: Tokenizer, *, family: str, placeholder: int, tokens: int,
    size: int,
) -> VideoPreprocessor | None:  # fmt: skip
    """What makes videos fit an encoder; None if the vocabulary has no token for them. Raises
    CheckpointError.

    placeholder: the token whose embeddings those of frames replace, at most `tokens` of the frames
    of a patch; each is for a square of `size` pixels.
    """
    settings, name = video_settings(checkpoint), checkpoint.path.name
    pad = tokenizer.name(placeholder)
    if not pad:
        return None
    images = processor_settings(checkpoint)
    if Normalization.of(dict(images) | dict(settings), name) != Normalization.of(images, name):
        raise CheckpointError(f"{name}: frames of videos are normalized otherwise than pictures")
    framing = _framing(settings, family, tokens, size)
    vision = checkpoint.metadata.get("vision_config")
    if family == "qwen3_vl":
        begin, end = (
            tokenizer.name(checkpoint.metadata.get(f"vision_{which}_token_id", default))
            for which, default in (("start", BEGIN), ("end", END))
        )
        return Qwen3VideoPreprocessor(begin, pad, end, placeholder, framing)
    pace = 0.0
    if family == "qwen2_5_vl" and isinstance(vision, Mapping):
        pace = float(number(vision.get("tokens_per_second", PACE), "tokens_per_second"))
    return Qwen2VideoPreprocessor(pad, placeholder, framing, pace)


def _framing(settings: Mapping[str, Any], family: str, tokens: int, size: int) -> QwenFrames:
    rate = settings.get("fps") or RATE
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= 1000:
        raise CheckpointError(f"fps of the video processor is {str(rate)[:40]}")
    shortest, longest = pixel_limits(settings, PIXELS.get(family, OTHER_PIXELS))
    share = settings.get("max_video_tokens") or SHARES.get(family, OTHER_SHARE)
    return QwenFrames(
        size, tokens, shortest, longest,
        number(settings.get("resample", BICUBIC), "resample", 5),
        number(settings.get("temporal_patch_size") or 2, "temporal_patch_size"), float(rate),
        number(settings.get("min_frames") or FEWEST, "min_frames"),
        min(MOST, number(settings.get("max_frames") or MOST, "max_frames")),
        number(share, "max_video_tokens", 1 << 30) if settings.get("cap_pixels_per_frame") else 0,
    )  # fmt: skip
