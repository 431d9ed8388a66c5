"""SmolVLM2's conversations, beside transformers' processor with the template that it has for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast, SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

from octavo.text.chat import ChatTemplate
from octavo.text.messages import read_messages
from octavo.vision.idefics3 import Idefics3Preprocessor
from octavo.vision.preprocess import Detail
from tests.parity.smolvlm import smolvlm_processor
from tests.parity.test_images import SHAPES, channels_first, conversations, ours, picture, words

TOKENS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
TOKENS += ["<|im_start|>", *(f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7))]


def tokenizer() -> PreTrainedTokenizerFast:
    """One that splits digits before bytes, as SmolVLM2's."""
    made = words(*TOKENS)
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), made.backend_tokenizer.pre_tokenizer]
    )
    return made


def processors() -> tuple[Any, Idefics3Preprocessor]:
    """Transformers' and ours, of tiles of 32 pixels with 4 tokens."""
    images = SmolVLMImageProcessorPil(
        size={"longest_edge": 128}, max_image_size={"longest_edge": 32}
    )
    theirs = smolvlm_processor(images, tokenizer(), 4)
    return theirs, Idefics3Preprocessor("<image>", theirs.image_token_id, 4, 128, 32, 1)


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def image(width: int, height: int) -> dict[str, Any]:
    return {"type": "image", "image": picture(width, height)}


SYSTEM = {"role": "system", "content": [text("Count to 1024.")]}
SEVERAL = [
    # Several pictures between texts, a system's message, contents that are strings.
    [SYSTEM, {"role": "user", "content": [text("From "), image(64, 64), text(" to\n"), image(1, 40)]}],
    [{"role": "user", "content": [image(300, 300), image(33, 200), image(97, 51), text("Which?")]}],
    [
        {"role": "user", "content": [image(40, 1), text("\n\n"), image(40, 1), text("\n")]},
        {"role": "assistant", "content": "Two of 12."},
        {"role": "user", "content": [text("And "), text("now: "), image(640, 360)]},
    ],
    [{"role": "user", "content": [image(1, 1)] * 8}],
    [SYSTEM, {"role": "user", "content": "No picture, 365 words."}],
]  # fmt: skip


@pytest.mark.parametrize("detail", ["high", "low"])
def test_conversations(detail: Detail) -> None:
    """The same token ids as the processor's, with pictures in tiles and whole."""
    theirs, preprocessor = processors()
    tokenizer = ours(theirs.tokenizer)
    template = ChatTemplate(DEFAULT_CHAT_TEMPLATE, tokenizer)
    for turns in [*SEVERAL, *conversations(30)]:
        wanted = theirs.apply_chat_template(
            turns, chat_template=DEFAULT_CHAT_TEMPLATE, tokenize=True, return_dict=True,
            add_generation_prompt=True, processor_kwargs={"do_image_splitting": detail == "high"},
        )["input_ids"]  # fmt: skip
        messages = read_messages(turns)
        seen = [preprocessor(p.source, detail, p.at) for m in messages for p in m.media]
        ids = template.encode(
            messages, placeholders=[preprocessor.placeholder], media=[s.text for s in seen]
        )
        assert ids == list(np.ravel(wanted))
        assert ids.count(preprocessor.token) == sum(i.tokens for s in seen for i in s.images)
    template.close()


@pytest.mark.parametrize("size", SHAPES, ids=str)
@pytest.mark.parametrize("splits", [True, False])
def test_pixels(size: tuple[int, int], splits: bool) -> None:
    theirs, preprocessor = processors()
    images = theirs.image_processor
    wanted = images(picture(*size), do_image_splitting=splits, return_tensors="np")["pixel_values"]
    made = preprocessor(picture(*size), "high" if splits else "low", "")
    ours = np.concatenate([part.array for part in made.images])
    assert np.array_equal(channels_first(ours, images), wanted[0])
