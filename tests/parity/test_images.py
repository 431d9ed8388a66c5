"""Pictures as encoders take them, beside transformers' processors: equal pixels, equal tokens."""

from __future__ import annotations

import io
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageOps
from transformers import (
    CLIPImageProcessorPil,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlavaImageProcessorPil,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
    Qwen2VLProcessor,
    Qwen3VLProcessor,
)

from octavo.errors import InvalidValue
from octavo.text.chat import ChatTemplate
from octavo.text.messages import read_messages
from octavo.text.tokenizer import SpecialIds, Tokenizer
from octavo.vision.decode import decode_image
from octavo.vision.gemma3 import Gemma3Preprocessor
from octavo.vision.idefics3 import Idefics3Preprocessor
from octavo.vision.llava import LlavaPreprocessor
from octavo.vision.llava_next import LlavaNextPreprocessor, Tiling
from octavo.vision.normalize import Normalization
from octavo.vision.preprocess import Preprocessor
from octavo.vision.qwen2_vl import Qwen2VLPreprocessor, pixel_limits
from octavo.vision.resize import Framing
from tests.vision_models import normalized

SHAPES = [
    (64, 64),
    (97, 51),
    (33, 200),
    (1, 1),
    (1, 40),
    (40, 1),
    (300, 300),
    (301, 299),
    (640, 360),
    (250, 700),
]


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Shapes over noise, so that every filter shows."""
    rng = np.random.default_rng(width * 1000 + height)
    image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
    pen = ImageDraw.Draw(image)
    pen.ellipse((width // 4, height // 4, width // 2, height), fill=(250, 20, 20))
    pen.line((0, 0, width, height), fill=(0, 0, 255), width=3)
    return image.convert(mode)


def channels_first(pixels: np.ndarray, processor: Any) -> np.ndarray:
    """What an encoder makes of our pixels."""
    settings = {
        "rescale_factor": 1 / 255,
        "image_mean": list(processor.image_mean),
        "image_std": list(processor.image_std),
    }
    return normalized(pixels, Normalization.of(settings, "")).transpose(0, 3, 1, 2)


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
    ours = Framing.of(processor.to_dict())(picture(*size), "")[None]
    assert np.array_equal(channels_first(ours, processor), wanted)


@pytest.mark.parametrize("size", SHAPES, ids=str)
def test_llava_padding(size: tuple[int, int]) -> None:
    processor = LlavaImageProcessorPil(do_pad=True, size={"shortest_edge": 56}, crop_size=56)
    wanted = processor(picture(*size), return_tensors="np")["pixel_values"]
    ours = Framing.of(processor.to_dict())(picture(*size), "")[None]
    assert np.array_equal(channels_first(ours, processor), wanted)


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
    return Tokenizer(
        theirs.backend_tokenizer,
        SpecialIds(
            theirs.bos_token_id,
            frozenset([theirs.eos_token_id]),
            theirs.eos_token_id,
            False,
            special,
        ),
    )


PART = "{% for p in m['content'] %}{% if p['type'] == 'image' %}IMAGE{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
TEMPLATES = {
    "llava": "{% for m in messages %}{{ m['role'].upper() + ': ' }}{% for p in m['content'] if p['type'] == 'image' %}<image>\n{% endfor %}{% for p in m['content'] if p['type'] == 'text' %}{{ p['text'] }} {% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}",
    "llava_next": "{% for m in messages %}[INST] " + PART.replace("IMAGE", "<image>\n") + " [/INST]{% endfor %}",
    "qwen2_vl": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n" + PART.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>") + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "idefics3": "<|im_start|>{% for m in messages %}{{ m['role'].capitalize() + ':' }}" + PART.replace("IMAGE", "<image>") + "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}",
    "gemma3": "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m['role'] }}\n" + PART.replace("IMAGE", "<start_of_image>") + "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
}  # fmt: skip
TEMPLATES |= dict.fromkeys(("qwen2_5_vl", "qwen3_vl"), TEMPLATES["qwen2_vl"])


def llava() -> tuple[Any, Preprocessor]:
    theirs = words("<image>")
    images = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size=56)
    processor = LlavaProcessor(
        images,
        theirs,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return processor, LlavaPreprocessor(
        "<image>", processor.image_token_id, 16, Framing.of(images.to_dict())
    )


def idefics3() -> tuple[Any, Preprocessor]:
    cells = [f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7)]
    theirs = words(
        "<fake_token_around_image>",
        "<image>",
        "<end_of_utterance>",
        "<global-img>",
        "<|im_start|>",
        *cells,
    )
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 128}, max_image_size={"longest_edge": 32}
    )
    processor = Idefics3Processor(images, theirs, image_seq_len=4)
    return processor, Idefics3Preprocessor("<image>", processor.image_token_id, 4, 128, 32, 1)


def gemma3() -> tuple[Any, Preprocessor]:
    theirs = words(
        "<start_of_image>",
        "<end_of_image>",
        "<image_soft_token>",
        "<start_of_turn>",
        "<end_of_turn>",
    )
    for name, token in (
        ("boi", "<start_of_image>"),
        ("eoi", "<end_of_image>"),
        ("image", "<image_soft_token>"),
    ):
        setattr(theirs, f"{name}_token", token)
        setattr(theirs, f"{name}_token_id", theirs.convert_tokens_to_ids(token))
    images = Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    processor = Gemma3Processor(images, theirs, image_seq_length=16)
    framing = Framing(size=(56, 56), resample=2)
    return processor, Gemma3Preprocessor(
        "<start_of_image>",
        theirs.image_token_id,
        "<image_soft_token>",
        "<end_of_image>",
        16,
        framing,
    )


def llava_next() -> tuple[Any, Preprocessor]:
    sizes = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size=28, image_grid_pinpoints=sizes
    )
    processor = LlavaNextProcessor(
        images,
        words("<image>"),
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    tiling = Tiling.of({"image_grid_pinpoints": sizes}, 28, 7)
    return processor, LlavaNextPreprocessor("<image>", processor.image_token_id, tiling, 3)


class WithoutVideos:
    """A processor without the part for videos, whose class needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
        assert argument_name != "video_processor" or argument is None


class Qwen2VL(WithoutVideos, Qwen2VLProcessor):
    pass


class Qwen25VL(WithoutVideos, Qwen2_5_VLProcessor):
    pass


class Qwen3VL(WithoutVideos, Qwen3VLProcessor):
    pass


def qwen2_vl(kind: type = Qwen2VL) -> tuple[Any, Preprocessor]:
    theirs = words(
        "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>", "<|im_start|>",
        "<|im_end|>",
    )  # fmt: skip
    images = Qwen2VLImageProcessorPil(
        patch_size=4, size={"shortest_edge": 256, "longest_edge": 64 * 40}
    )
    processor = kind(images, theirs, None)
    limits = pixel_limits(images.to_dict())
    return processor, Qwen2VLPreprocessor(
        "<|image_pad|>", processor.image_token_id, 8, 40, *limits, 3
    )


FAMILIES = {
    "llava": llava,
    "llava_next": llava_next,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": partial(qwen2_vl, Qwen25VL),
    "qwen3_vl": partial(qwen2_vl, Qwen3VL),
    "idefics3": idefics3,
    "gemma3": gemma3,
}
TEXTS = [
    "What is this?",
    "  two\n\nlines ",
    "caf\u00e9 \u4f60\u597d",
    "\n\n",
    "a",
    "Compare them:\n",
]


def conversations(count: int) -> list[list[dict[str, Any]]]:
    """Turns of text with no, one or several pictures anywhere in them."""
    out = []
    for number in range(count):
        rng = random.Random(number)
        turns = []
        for turn in range(rng.choice((1, 1, 3))):
            texts = [
                {"type": "text", "text": rng.choice(TEXTS)} for _ in range(rng.choice((1, 1, 2)))
            ]
            pictures = [
                {"type": "image", "image": picture(*rng.choice(SHAPES))}
                for _ in range(rng.choice((0, 1, 1, 2)))
            ]
            parts = (
                texts if turn % 2 else rng.sample([*texts, *pictures], len(texts) + len(pictures))
            )
            turns.append({"role": "assistant" if turn % 2 else "user", "content": parts})
        out.append(turns)
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_conversations(family: str) -> None:
    """30 conversations: the same token ids as the reference processor's, and each image's tokens."""
    processor, preprocessor = FAMILIES[family]()
    tokenizer = ours(processor.tokenizer)
    template = ChatTemplate(TEMPLATES[family], tokenizer)
    for turns in conversations(30):
        wanted = processor.apply_chat_template(
            turns, chat_template=TEMPLATES[family], tokenize=True, return_dict=True,
            add_generation_prompt=True,
        )["input_ids"]  # fmt: skip
        messages = read_messages(turns)
        seen = [preprocessor(p.source, "auto", p.at) for m in messages for p in m.media]
        ids = template.encode(
            messages, placeholders=[preprocessor.placeholder], media=[s.text for s in seen]
        )
        assert ids == list(np.ravel(wanted))
        filled = sum(image.tokens for s in seen for image in s.images)
        assert ids.count(preprocessor.token) == filled
    template.close()


@pytest.mark.parametrize("size", SHAPES[3:] + SHAPES[:3], ids=str)
@pytest.mark.parametrize("splits", [True, False])
def test_idefics3_pixels(size: tuple[int, int], splits: bool) -> None:
    processor, preprocessor = idefics3()
    images = processor.image_processor
    wanted = images(picture(*size), do_image_splitting=splits, return_tensors="np")["pixel_values"]
    made = preprocessor(picture(*size), "high" if splits else "low", "")
    ours = np.concatenate([image.array for image in made.images])
    assert np.array_equal(channels_first(ours, images), wanted[0])


@pytest.mark.parametrize("size", SHAPES, ids=str)
def test_gemma3_pixels(size: tuple[int, int]) -> None:
    processor, preprocessor = gemma3()
    wanted = processor.image_processor(picture(*size), return_tensors="np")["pixel_values"]
    (image,) = preprocessor(picture(*size), "auto", "").images
    assert np.array_equal(channels_first(image.array, processor.image_processor), wanted)


@pytest.mark.parametrize("size", SHAPES, ids=str)
def test_llava_next_pixels(size: tuple[int, int]) -> None:
    processor, preprocessor = llava_next()
    wanted = processor.image_processor(picture(*size), return_tensors="np")["pixel_values"]
    (image,) = preprocessor(picture(*size), "auto", "").images
    assert np.array_equal(channels_first(image.array, processor.image_processor), wanted[0])
    (low,) = preprocessor(picture(*size), "low", "").images
    assert np.array_equal(low.array[0], image.array[0]) and low.tokens == 50


def patches(values: np.ndarray, side: int) -> np.ndarray:
    """Pixels, channels first, of one picture as Qwen-VL's processor lays them out."""
    _, _, height, width = values.shape
    grid = values[0].reshape(3, height // side // 2, 2, side, width // side // 2, 2, side)
    cut = grid.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    return np.repeat(cut, 2, axis=5).reshape(-1, 3 * 2 * side * side)


@pytest.mark.parametrize("size", SHAPES, ids=str)
def test_qwen2_vl_pixels(size: tuple[int, int]) -> None:
    processor, preprocessor = qwen2_vl()
    wanted = processor.image_processor(picture(*size), return_tensors="np")
    (image,) = preprocessor(picture(*size), "high", "").images
    grid = [1, image.shape[1] // 4, image.shape[2] // 4]
    assert wanted["image_grid_thw"].tolist() == [grid]
    ours = patches(channels_first(image.array, processor.image_processor), 4)
    assert np.array_equal(ours, wanted["pixel_values"])


def test_qwen2_vl_details() -> None:
    """Low detail is at most 256 tokens; pictures of impossible proportions are refused."""
    preprocessor = Qwen2VLPreprocessor("<i>", 0, 28, 4096, 3136, 12845056, 3)
    (low,), (high,) = (
        preprocessor(picture(900, 600), d, "").images for d in ("low", "high")
    )  # fmt: skip
    assert (low.tokens, high.tokens) == (13 * 19, 21 * 32)
    with pytest.raises(InvalidValue, match="at has 1 x 201 pixels"):
        preprocessor(picture(1, 201), "auto", "at")
    with pytest.raises(InvalidValue, match="12 at most"):
        Qwen2VLPreprocessor("<i>", 0, 8, 12, 256, 768, 3)(picture(1, 199), "auto", "at")


FILES = [
    *(("PNG", mode) for mode in ("RGB", "L", "1", "P", "LA", "RGBA")), ("JPEG", "RGB"), ("JPEG", "L"),
    ("JPEG", "CMYK"), ("WEBP", "RGB"), ("WEBP", "RGBA"), ("GIF", "P"), ("GIF", "RGBA"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "mode"), FILES)
def test_files(kind: str, mode: str) -> None:
    """Files of every format and mode that is taken: what the reference makes of them."""
    image = picture(40, 30).convert(mode)
    if "A" in mode:
        image.putalpha(Image.linear_gradient("L").resize(image.size))
    out = io.BytesIO()
    image.save(out, kind)
    wanted = CLIPImageProcessorPil().convert_to_rgb(Image.open(io.BytesIO(out.getvalue())))
    assert np.array_equal(np.asarray(decode_image(out.getvalue(), "image")), wanted)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    out = io.BytesIO()
    picture(40, 30).save(out, "PNG", exif=exif)
    wanted = ImageOps.exif_transpose(Image.open(out))
    assert np.array_equal(np.asarray(decode_image(out.getvalue(), "image")), np.asarray(wanted))


def test_sixteen_bits() -> None:
    """16-bit files keep their high bytes; Pillow's own conversion would make most of it white."""
    values = (np.arange(40 * 30, dtype=np.uint32).reshape(30, 40) * 54).astype(np.uint16)
    out = io.BytesIO()
    Image.fromarray(values).save(out, "PNG")
    decoded = np.asarray(decode_image(out.getvalue(), "image"))
    assert np.array_equal(decoded, np.repeat((values >> 8).astype(np.uint8)[..., None], 3, 2))
