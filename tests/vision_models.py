"""Small random models of every family that takes images, as transformers saves them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from octavo.vision.image import ImageInput
from octavo.vision.llava_next import LlavaNextPreprocessor, Tiling
from octavo.vision.normalize import Normalization
from octavo.vision.preprocess import Preprocessor
from octavo.vision.qwen2_vl import Qwen2VLPreprocessor

MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
VOCABULARY = 320
PLACEHOLDER, VIDEO = 300, 301
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 3,
    "image_size": 30, "patch_size": 6,
}  # fmt: skip


@dataclass(frozen=True)
class VisionFamily:
    """model_type and settings for transformers; tokens: placeholders of an image.

    preprocessor: of families whose images differ in shape, and the name and settings of
    transformers' processor, which both take the same pictures.
    """

    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    tokens: int = 25
    size: int = 30
    preprocessor: Preprocessor | None = None
    processor: tuple[str, dict[str, Any]] = ("", {})

    def build(self) -> torch.nn.Module:
        from transformers import AutoConfig, AutoModelForImageTextToText

        torch.manual_seed(5)
        config = AutoConfig.for_model(self.model_type, **self.settings)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
        gemma = self.model_type.startswith("gemma")
        with torch.no_grad():
            for name, p in model.named_parameters():
                fan = p[0].numel() if p.ndim > 1 else 25
                scale = 0.1 if name.endswith("bias") else fan**-0.5
                p.copy_(torch.randn_like(p) * scale)
                if "norm" in name and name.endswith("weight"):
                    text = "vision" not in name
                    p.add_(0.0 if gemma and text else 1.0)
        return model

    def save(self, folder: Path, dtype: str = "float32") -> torch.nn.Module:
        """Writes a folder as the model's authors do; the same model as it is read, in fp32."""
        self.build().to(getattr(torch, dtype)).save_pretrained(folder)
        settings = {
            "do_normalize": True, "do_rescale": True, "rescale_factor": 1 / 255,
            "image_mean": MEAN, "image_std": STD,
        }  # fmt: skip
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
        if self.preprocessor is not None:
            self.reference_processor().save_pretrained(folder)
        return self.load(folder)

    def load(self, folder: Path) -> torch.nn.Module:
        """What was saved, as transformers reads it, in fp32."""
        from transformers import AutoModelForImageTextToText

        return AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def reference_processor(self) -> Any:
        import transformers

        name, settings = self.processor
        return getattr(transformers, name)(**settings, image_mean=MEAN, image_std=STD)

    def image(self, seed: int) -> ImageInput:
        if self.preprocessor is not None:
            (image,) = self.preprocessor(picture(seed), "auto", "").images
            return image
        pixels = np.random.default_rng(seed).integers(0, 256, (1, self.size, self.size, 3))
        return ImageInput.of(pixels.astype(np.uint8), (self.size, self.size), self.tokens)

    def logits(self, model: torch.nn.Module, ids: list[int], seeds: Sequence[int]) -> np.ndarray:
        """What transformers computes of images."""
        given: dict[str, Any] = {}
        images = [self.image(seed) for seed in seeds]
        if self.preprocessor is not None and images:
            pictures = [picture(seed) for seed in seeds]
            given = dict(self.reference_processor()(images=pictures, return_tensors="pt"))
            if self.model_type.startswith("qwen"):
                given["mm_token_type_ids"] = torch.tensor([[int(i == PLACEHOLDER) for i in ids]])
        elif images:
            how = Normalization(1 / 255, MEAN, STD)
            pixels = torch.from_numpy(np.concatenate([normalized(i.array, how) for i in images]))
            pixels = pixels.permute(0, 3, 1, 2).contiguous()
            given["pixel_values"] = (
                pixels[None] if self.model_type in ("idefics3", "smolvlm") else pixels
            )
        if self.model_type == "gemma3":
            given["token_type_ids"] = torch.tensor([[int(i == PLACEHOLDER) for i in ids]])
        with torch.inference_mode():
            return model(input_ids=torch.tensor([ids]), **given).logits[0].numpy()


def normalized(pixels: np.ndarray, how: Normalization) -> np.ndarray:
    """Pixels `[..., 3]` as an encoder takes them, in the arithmetic of transformers."""
    values = np.multiply(pixels, how.scale, dtype=np.float64).astype(np.float32)
    return (values - np.array(how.mean, np.float32)) / np.array(how.std, np.float32)


def frames(seed: int, count: int) -> list[Image.Image]:
    """Frames of noise that is shifted, of a shape as a picture's."""
    image = np.asarray(picture(seed))
    return [Image.fromarray(np.roll(image, i, axis=1)) for i in range(count)]


PICTURES = [(40, 24), (19, 70), (1, 40), (64, 64), (90, 3), (33, 9), (7, 7)]  # width and height


def picture(seed: int) -> Image.Image:
    """Noise of an odd shape: portraits, lines of one pixel, squares."""
    width, height = PICTURES[seed % len(PICTURES)]
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3))
    return Image.fromarray(pixels.astype(np.uint8))


def _clip(**more: Any) -> dict[str, Any]:
    return TOWER | {"model_type": "clip_vision_model", "projection_dim": 32} | more


LLAVA = {
    "vision_config": _clip(), "text_config": TEXT | {"model_type": "llama"},
    "image_token_index": PLACEHOLDER, "image_seq_length": 25,
}  # fmt: skip
NEXT_SIZES = [[30, 60], [60, 30], [60, 60], [90, 30]]
QWEN_TOWER: dict[str, Any] = {
    "depth": 3, "num_heads": 3, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
QWEN_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
QWEN_TOKENS = 24


def _qwen(version: str, tower: dict[str, Any], text: dict[str, Any] | None = None) -> VisionFamily:
    """One whose images have 4 to 24 tokens."""
    size = {"shortest_edge": 4 * 64, "longest_edge": QWEN_TOKENS * 64}
    return VisionFamily(
        version,
        {
            "vision_config": QWEN_TOWER | tower | {"model_type": f"{version}_vision"},
            "text_config": TEXT
            | {"model_type": f"{version}_text", "rope_parameters": QWEN_ROPE}
            | (text or {}),
            "image_token_id": PLACEHOLDER, "video_token_id": VIDEO, "vision_start_token_id": 302,
            "vision_end_token_id": 303,
        },
        QWEN_TOKENS,
        8,
        Qwen2VLPreprocessor("<image>", PLACEHOLDER, 8, QWEN_TOKENS, 4 * 64, QWEN_TOKENS * 64, 3),
        ("Qwen2VLImageProcessorPil", {"patch_size": 4, "merge_size": 2, "size": size}),
    )  # fmt: skip


VISION_FAMILIES = {
    "qwen3_vl": _qwen(
        "qwen3_vl",
        {
            "hidden_size": 48, "out_hidden_size": 64, "intermediate_size": 80,
            "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1],
        },
        {"head_dim": 16},
    ),
    "llava_next": VisionFamily(
        "llava_next",
        LLAVA | {"image_grid_pinpoints": NEXT_SIZES},
        25,
        30,
        LlavaNextPreprocessor(
            "<image>", PLACEHOLDER, Tiling(((1, 2), (2, 1), (2, 2), (3, 1)), 30, 5), 3
        ),
        (
            "LlavaNextImageProcessorPil",
            {
                "size": {"shortest_edge": 30}, "crop_size": {"height": 30, "width": 30},
                "image_grid_pinpoints": NEXT_SIZES,
            },
        ),
    ),
    "qwen2_vl": _qwen("qwen2_vl", {"embed_dim": 48, "hidden_size": 64, "mlp_ratio": 2}),
    "qwen2_5_vl": _qwen(
        "qwen2_5_vl",
        {
            "hidden_size": 48, "out_hidden_size": 64, "intermediate_size": 80, "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    ),
    "llava": VisionFamily("llava", LLAVA),
    "llava-full": VisionFamily(
        "llava", LLAVA | {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}, 26
    ),
    "llava-siglip-qwen2": VisionFamily(
        "llava",
        LLAVA
        | {
            "vision_config": TOWER | {"model_type": "siglip_vision_model"},
            "text_config": TEXT | {"model_type": "qwen2"},
            "vision_feature_select_strategy": "full",
        },
    ),
    "idefics3": VisionFamily(
        "idefics3",
        {
            "vision_config": TOWER | {"image_size": 156, "model_type": "idefics3_vision"},
            "text_config": TEXT | {"model_type": "llama"},
            "image_token_id": PLACEHOLDER, "scale_factor": 2,
        },
        169,
        156,
    ),
    "smolvlm": VisionFamily(
        "smolvlm",
        {
            "vision_config": TOWER | {"image_size": 48, "model_type": "smolvlm_vision"},
            "text_config": TEXT | {"model_type": "llama", "tie_word_embeddings": True},
            "tie_word_embeddings": True, "image_token_id": PLACEHOLDER, "scale_factor": 4,
        },
        4,
        48,
    ),
    "gemma3": VisionFamily(
        "gemma3",
        {
            "vision_config": TOWER | {"image_size": 48, "model_type": "siglip_vision_model"},
            "text_config": {k: v for k, v in TEXT.items() if k != "tie_word_embeddings"}
            | {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2},
            "mm_tokens_per_image": 16, "image_token_index": PLACEHOLDER,
        },
        16,
        48,
    ),
}  # fmt: skip
