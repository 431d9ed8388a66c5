"""SmolVLM's processor of transformers, without its parts for videos.

These need torchvision and num2words, which writes out how many frames a video has; pictures and
texts need neither.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from transformers import PreTrainedTokenizerFast, SmolVLMProcessor
from transformers.models.smolvlm import processing_smolvlm


class _SmolVLM(SmolVLMProcessor):
    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
        assert argument_name != "video_processor" or argument is None


def smolvlm_processor(images: Any, tokenizer: PreTrainedTokenizerFast, tokens: int) -> Any:
    """tokens: of a tile."""
    with patch.object(processing_smolvlm, "num2words", str):
        processor = _SmolVLM(images, tokenizer, None, image_seq_len=tokens)
    processor.video_processor = SimpleNamespace(num_frames=None, fps=None)  # defaults of videos
    return processor
