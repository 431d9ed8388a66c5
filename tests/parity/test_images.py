"""Pictures as encoders take them, beside transformers' processors: equal pixels, equal tokens."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw
from transformers import (
    CLIPImageProcessorPil,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlavaImageProcessorPil,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    Qwen2VLProcessor,
)

from octavo.errors import RequestError
from octavo.text.tokenizer import SpecialIds, Tokenizer
from octavo.vision.decode import decode_image
from octavo.vision.gemma3 import Gemma3Preprocessor
from octavo.vision.idefics3 import Idefics3Preprocessor
from octavo.vision.llava import LlavaPreprocessor
from octavo.vision.normalize import Normalization
from octavo.vision.preprocess import Preprocessor
from octavo.vision.qwen2_vl import Qwen2VLPreprocessor
from octavo.vision.resize import Framing

SHAPES = [(64, 64), (97, 51), (33, 200), (1, 1), (1, 40), (40, 1), (300, 300), (301, 299), (640, 360), (250, 700)]


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Shapes over noise, so that every filter shows."""
    rng = np.random.default_rng(width * 1000 + height)
    image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
    pen = ImageDraw.Draw(image)
    pen.ellipse((width // 4, height // 4, width // 2, height), fill=(250, 20, 20))
    pen.line((0, 0, width, height), fill=(0, 0, 255), width=3)
    return image.convert(mode)


def normalized(pixels: np.ndarray, processor: Any) -> np.ndarray:
    """What an encoder makes of our pixels, channels first."""
    values = Normalization.of({"rescale_factor": 1 / 255, "image_mean": list(processor.image_mean), "image_std": list(processor.image_std)}, "")(pixels)
    return values.transpose(0, 3, 1, 2)


FRAMES: dict[str, dict[str, Any]] = {
    "llava": {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
    "wide crop": {"size": {"shortest_edge": 40}, "crop_size": {"height": 57, "width": 63}},
    "stretched": {"size": {"height": 48, "width": 48}, "do_center_crop": False},
    "bilinear": {"size": {"shortest_edge": 56}, "crop_size": 56, "resample": 2},
    "default": {},
}


@pytest.mark.parametrize("size", SHAPES, ids=str)
@pytest.mark.parametrize("frame", FRAMES)
def test_clip_pixels(frame: str, size: tuple[int, int]) -> None:
    processor = CLIPImageProcessorPil(**FRAMES[frame])
    wanted = processor(picture(*size), return_tensors="np")["pixel_values"]
    ours = np.asarray(Framing.of(processor.to_dict())(picture(*size), ""))[None]
    assert np.array_equal(normalized(ours, processor), wanted)


@pytest.mark.parametrize("size", SHAPES, ids=str)
def test_llava_padding(size: tuple[int, int]) -> None:
    processor = LlavaImageProcessorPil(do_pad=True, size={"shortest_edge": 56}, crop_size=56)
    wanted = processor(picture(*size), return_tensors="np")["pixel_values"]
    ours = np.asarray(Framing.of(processor.to_dict())(picture(*size), ""))[None]
    assert np.array_equal(normalized(ours, processor), wanted)


def words(*more: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that merges line breaks, with these control tokens."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate([*alphabet, "ĊĊ"])}
    backend = Backend(models.BPE(vocabulary, [("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>", *more)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def ours(theirs: PreTrainedTokenizerFast) -> Tokenizer:
    special = frozenset(theirs.all_special_ids) | frozenset(theirs.added_tokens_decoder)
    return Tokenizer(theirs.backend_tokenizer, SpecialIds(theirs.bos_token_id, frozenset([theirs.eos_token_id]), theirs.eos_token_id, False, special))
