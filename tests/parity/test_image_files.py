"""From the file of a picture to log-probabilities, beside transformers' processor and model.

Of the families whose processors write more around an image than its tokens: tiles by their row and
column, tokens that begin and end it.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PreTrainedTokenizerFast,
    SmolVLMImageProcessorPil,
)

import octavo
from octavo.errors import RequestError
from octavo.generate.sources import decoded
from tests.api.test_images import ABOUT, TEMPLATE, drawing, shown, write_text_files
from tests.parity.smolvlm import smolvlm_processor
from tests.vision_models import MEAN, PICTURES, STD, VISION_FAMILIES, picture

TILES = ["<fake_token_around_image>", "<global-img>"]
TILES += [f"<row_{r}_col_{c}>" for r in range(1, 5) for c in range(1, 5)]
AROUND = ["<begin>", "<end>"]
NORMAL = {"image_mean": list(MEAN), "image_std": list(STD)}
PARAMS = octavo.SamplingParams(temperature=0, max_tokens=5, logprobs=0, ignore_eos=True)


def idefics3(tokenizer: PreTrainedTokenizerFast) -> Any:
    sides = {"size": {"longest_edge": 312}, "max_image_size": {"longest_edge": 156}}
    return Idefics3Processor(Idefics3ImageProcessorPil(**sides, **NORMAL), tokenizer, 169)


def smolvlm(tokenizer: PreTrainedTokenizerFast) -> Any:
    sides = {"size": {"longest_edge": 192}, "max_image_size": {"longest_edge": 48}}
    return smolvlm_processor(SmolVLMImageProcessorPil(**sides, **NORMAL), tokenizer, 4)


def gemma3(tokenizer: PreTrainedTokenizerFast) -> Any:
    for name, token in (("boi", "<begin>"), ("eoi", "<end>"), ("image", "<image>")):
        setattr(tokenizer, f"{name}_token", token)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    images = Gemma3ImageProcessorPil(size={"height": 48, "width": 48}, **NORMAL)
    return Gemma3Processor(images, tokenizer, image_seq_length=16)


# A processor, the tokens after the image token, and what the template writes for an image.
KINDS: dict[str, tuple[Callable[[PreTrainedTokenizerFast], Any], list[str], str]] = {
    "idefics3": (idefics3, TILES, "<image>"),
    "smolvlm": (smolvlm, TILES, "<image>"),
    "gemma3": (gemma3, AROUND, "<begin>"),
}


def saved(name: str, folder: Path) -> tuple[torch.nn.Module, Any, str]:
    """A folder with every file, transformers' model and processor of it, and the template."""
    make, more, shows = KINDS[name]
    family = VISION_FAMILIES[name]
    text = family.settings["text_config"] | {"max_position_embeddings": 2048}
    changes: dict[str, Any] = {"text_config": text}
    if name == "gemma3":
        changes |= {"boi_token_index": 301, "eoi_token_index": 302}
    model = replace(family, settings=family.settings | changes).save(folder)
    template = TEMPLATE.replace("<image>", shows)
    tokenizer = write_text_files(folder, more, template)
    processor = make(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"))
    processor.image_processor.save_pretrained(folder)
    return model, processor, template


def theirs(processor: Any, template: str, messages: list[Any], **options: Any) -> dict[str, Any]:
    """What transformers' processor makes of a conversation with pictures in files."""
    turns = [
        m | {"content": [
            {"type": "image", "image": opened(p)} if p["type"] == "image_url" else p
            for p in m["content"]
        ]}
        for m in messages
    ]  # fmt: skip
    return dict(
        processor.apply_chat_template(
            turns, chat_template=template, tokenize=True, return_dict=True, return_tensors="pt",
            add_generation_prompt=True, processor_kwargs=options,
        )
    )  # fmt: skip


def opened(part: dict[str, Any]) -> Image.Image:
    data = decoded(part["image_url"]["url"].partition(",")[2], "")
    return Image.open(io.BytesIO(data))


def png(seed: int) -> bytes:
    file = io.BytesIO()
    picture(seed).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("seeds", [[0], [1], [2], [3], [4], [1, 6]], ids=lambda s: str(
    [PICTURES[i] for i in s]
))  # fmt: skip
@pytest.mark.parametrize("name", KINDS)
def test_from_files_to_the_answer(name: str, seeds: list[int], tmp_path: Path) -> None:
    """Prompts have transformers' tokens, and replies its log-probabilities, to 2e-3."""
    model, processor, template = saved(name, tmp_path)
    messages = shown(*map(png, seeds), text=ABOUT)
    with octavo.LLM(str(tmp_path), memory="2GiB", threads=1, kv_dtype="f32") as llm:
        (found,) = llm.chat(messages, PARAMS)
    given = theirs(processor, template, messages)
    length = given["input_ids"].shape[1]
    assert found.prompt_tokens == length
    more = torch.tensor([found.tokens])
    given["input_ids"] = torch.cat([given["input_ids"], more], 1)
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    kinds = given.pop("token_type_ids", None)  # of Gemma 3's tokens
    if kinds is not None:
        given["token_type_ids"] = torch.cat([kinds, torch.zeros_like(more)], 1)
    with torch.inference_mode():
        logits = model(**given).logits[0]
    expected = logits.log_softmax(-1)[length - 1 : -1]
    drawn = [float(row[token]) for row, token in zip(expected, found.tokens, strict=True)]
    assert np.abs(np.array(drawn) - found.logprobs).max() < 2e-3
    assert (expected.max(-1).values.numpy() - drawn).max() < 4e-3


@pytest.mark.parametrize("name", ["idefics3", "smolvlm"])
def test_low_detail_is_one_tile(name: str, tmp_path: Path) -> None:
    _, processor, template = saved(name, tmp_path)
    messages = shown(drawing(size=(600, 400)), text=ABOUT)
    low = theirs(processor, template, messages, do_image_splitting=False)["input_ids"]
    high = theirs(processor, template, messages)["input_ids"]
    with octavo.LLM(str(tmp_path), memory="2GiB", threads=1) as llm:
        counts = []
        for detail in ("low", "high"):
            messages[0]["content"][0]["image_url"]["detail"] = detail
            counts.append(llm.chat(messages, PARAMS)[0].prompt_tokens)
    assert counts == [low.shape[1], high.shape[1]] and counts[0] < counts[1]


def test_gemma3_has_one_resolution(tmp_path: Path) -> None:
    saved("gemma3", tmp_path)
    messages = shown(drawing(), text=ABOUT)
    messages[0]["content"][0]["image_url"]["detail"] = "low"
    with octavo.LLM(str(tmp_path), memory="2GiB", threads=1) as llm:
        with pytest.raises(RequestError, match="this model has one resolution, auto"):
            llm.chat(messages, PARAMS)
