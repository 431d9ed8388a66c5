"""Videos as Qwen-VL's models take them, beside transformers' processors and models."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import transformers.video_processing_utils  # before torchvision seems to be here

import octavo
from octavo.vision.clip import Clip
from octavo.vision.normalize import Normalization
from octavo.vision.qwen_video import Qwen2VideoPreprocessor, Qwen3VideoPreprocessor, QwenFrames
from tests.api.test_images import VIDEO_TEMPLATE, VIDEO_TOKENS, write_text_files
from tests.vision_models import MEAN, STD, VIDEO, VISION_FAMILIES, frames, normalized

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SIDE = 8
PAD = "<|video_pad|>"


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """transformers' modules of video processors. They import torchvision, for resizing alone, which
    no test calls: where it is not there, an empty module stands for it."""
    parts = ("torchvision", "transforms", "v2", "functional")
    names = [".".join(parts[: i + 1]) for i in range(4)]
    added = [name for name in names if name not in sys.modules]
    sys.modules.update({name: ModuleType(name) for name in added})
    try:
        return {
            name: importlib.import_module(f"transformers.models.{name}.video_processing_{name}")
            for name in ("qwen2_vl", "qwen3_vl")
        }
    finally:
        for name in added:
            del sys.modules[name]


def clip(count: int, rate: float = 2.0, sampled: bool = True, seed: int = 0, **more: Any) -> Clip:
    made = frames(seed, count)
    return Clip(count, rate, lambda numbers: (made[n] for n in numbers), sampled, **more)


def framing(**more: Any) -> QwenFrames:
    return QwenFrames(SIDE, 24, 256, 24 * 64, 3, **more)


COUNTS = [(n, rate) for n in (1, 2, 3, 4, 5, 7, 9, 17, 61, 250, 1801) for rate in (1.0, 2.0, 29.97)]


@pytest.mark.parametrize("fps", [0.5, 2.0, 8.0])
def test_frames_of_qwen2(fps: float, reference: dict[str, Any]) -> None:
    """Which frames are shown. The reference has none of a video of one frame, and by rounding one
    number too many of some."""
    sample = reference["qwen2_vl"].Qwen2VLVideoProcessor.sample_frames
    ours = Qwen2VideoPreprocessor(PAD, 0, framing())
    settings = SimpleNamespace(
        fps=None, num_frames=None, temporal_patch_size=2, min_frames=4, max_frames=768
    )
    for count, rate in COUNTS[3:]:
        meta = SimpleNamespace(total_num_frames=count, fps=rate)
        wanted = sample(settings, meta, fps=fps).tolist()
        found = ours._choose(count / rate * fps, count)
        assert found == wanted[: len(found)] and len(wanted) - len(found) in (0, 1), (count, rate)
        assert len(found) % 2 == 0
    assert ours._choose(0.5, 1) == [0]


@pytest.mark.parametrize("fps", [0.5, 2.0, 8.0])
def test_frames_of_qwen3(fps: float, reference: dict[str, Any]) -> None:
    sample = reference["qwen3_vl"].Qwen3VLVideoProcessor.sample_frames
    settings = SimpleNamespace(fps=None, min_frames=4, max_frames=768)
    ours = Qwen3VideoPreprocessor("<", PAD, ">", 0, framing())
    for count, rate in COUNTS:
        meta = SimpleNamespace(total_num_frames=count, fps=rate)
        wanted = sample(settings, meta, fps=fps).tolist()
        assert ours._choose(count / rate * fps, count) == wanted


SIZES = [(24, 40), (70, 19), (40, 1), (64, 64), (3, 90), (360, 640), (1080, 1920), (9, 1700)]


@pytest.mark.parametrize("share", [0, 30, 768])
def test_sizes(share: int, reference: dict[str, Any]) -> None:
    """Height and width of frames, with and without cap_pixels_per_frame."""
    limits = SimpleNamespace(shortest_edge=256, longest_edge=64 * 64 * 40)
    given = {"size": limits, "resample": 3, "factor": SIDE, "temporal_factor": 2}

    def wanted(name: str, count: int, size: tuple[int, int]) -> tuple[int, int]:
        kept: list[Any] = []
        base = SimpleNamespace(resize=lambda **k: kept.append((k["size"].height, k["size"].width)))
        module = reference[name]
        processor = getattr(
            module, "Qwen2VLVideoProcessor" if name == "qwen2_vl" else "Qwen3VLVideoProcessor"
        )

        class Sized(processor):  # type: ignore[misc, valid-type]
            max_video_tokens = share

            def __init__(self) -> None:
                pass

        resize = transformers.video_processing_utils.BaseVideoProcessor.resize
        try:
            transformers.video_processing_utils.BaseVideoProcessor.resize = (  # type: ignore[method-assign]
                lambda self, image, size, resample: base.resize(size=size)
            )
            Sized().resize(
                torch.empty(1, count, 3, *size), cap_pixels_per_frame=bool(share), **given
            )
        finally:
            transformers.video_processing_utils.BaseVideoProcessor.resize = resize  # type: ignore[method-assign]
        return kept[0]

    frames_ = QwenFrames(SIDE, 1 << 20, 256, 64 * 64 * 40, 3, share=share)
    second, third = (
        Qwen2VideoPreprocessor(PAD, 0, frames_),
        Qwen3VideoPreprocessor("", PAD, "", 0, frames_),
    )
    for size in SIZES:
        for count in (2, 3, 5, 6, 60):
            assert second._size(count, *size) == wanted("qwen2_vl", count, size)
            assert third._size(count, *size) == wanted("qwen3_vl", count, size)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_pixels(count: int, reference: dict[str, Any]) -> None:
    """Each frame is resized as transformers' Pillow processor resizes a picture of these limits, and
    frames are put into patches as its processor of videos does it, both bit for bit."""
    pictures = frames(3, count)
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": 256, "longest_edge": 24 * 64},
        image_mean=MEAN, image_std=STD,
    )  # fmt: skip
    alone = images(images=pictures, return_tensors="pt")
    _, down, across = alone["image_grid_thw"][0].tolist()
    made = Qwen2VideoPreprocessor(PAD, 0, framing())(clip(count, seed=3), "").images
    assert {image.shape for image in made} == {(2, down * 4, across * 4, 3)}
    vision = GRID
    rows = [vision.patches(image) for image in made]
    values = [normalized(image.array, Normalization(1 / 255, MEAN, STD)) for image in made]
    video = torch.from_numpy(np.concatenate(values)[:count]).permute(0, 3, 1, 2)[None].contiguous()
    patchify = reference["qwen2_vl"].Qwen2VLVideoProcessor.patchify
    wanted, t, h, w = patchify(None, video, patch_size=4, merge_size=2, temporal_patch_size=2)
    assert (t, h, w) == (len(made), down, across)
    assert np.array_equal(np.concatenate(rows), wanted[0].numpy())
    own = alone["pixel_values"].reshape(count, -1, 3, 2, 16)
    each = wanted[0].reshape(t, down * across, 3, 2, 16)
    assert torch.equal(own[0, :, :, 0], each[0, :, :, 0])
    assert torch.equal(own[-1, :, :, 0], each[-1, :, :, 1])
    # torch, with which its processor of videos resizes, rounds otherwise
    first = torch.from_numpy(np.array(pictures[0])).permute(2, 0, 1)[None]
    other = torch.nn.functional.interpolate(
        first, (down * 4, across * 4), mode="bicubic", antialias=True
    )
    ours = made[0].array[0].transpose(2, 0, 1).astype(int)
    assert np.abs(ours - other[0].numpy().astype(int)).max() <= 1


class Grid:
    """A tower's patches without its weights."""

    def __init__(self) -> None:
        from octavo.models.grid import GridTower, GridVision

        none: Any = None
        self.vision = GridVision(
            "qwen2_vl", GridTower(none, 4, 2, 2), (), Normalization(1 / 255, MEAN, STD), 0, 1, 24
        )

    def patches(self, image: Any) -> np.ndarray:
        return self.vision.patches(image)


GRID = Grid()


@pytest.mark.parametrize(
    ("count", "rate", "sampled"),
    [(1, 2.0, True), (5, 1.0, True), (8, 29.97, True), (61, 29.97, False)],
)
def test_texts(count: int, rate: float, sampled: bool) -> None:
    """What a placeholder becomes, with the times of Qwen3-VL. Qwen's own code has this in the place of
    the tokens around the placeholder too."""
    made = Qwen3VideoPreprocessor("<|vision_start|>", PAD, "<|vision_end|>", 0, framing())
    found = made(clip(count, rate, sampled), "")
    shown = list(range(count)) if sampled else made._choose(count / rate * 2, count)
    _, height, width, _ = found.images[0].shape
    grid = torch.tensor([[len(found.images), height // 4, width // 4]])
    processor = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2), video_token=PAD,
        vision_start_token="<|vision_start|>", vision_end_token="<|vision_end|>",
    )  # fmt: skip
    calculate = transformers.Qwen3VLProcessor._calculate_timestamps
    processor._calculate_timestamps = lambda *a: calculate(processor, *a)
    inputs = {
        "video_grid_thw": grid,
        "video_metadata": [SimpleNamespace(frames_indices=list(shown), fps=rate)],
    }
    assert found.text == transformers.Qwen3VLProcessor.replace_video_token(processor, inputs, 0)
    second = Qwen2VideoPreprocessor(PAD, 0, framing())(clip(count, rate), "")
    grid = torch.tensor([[len(second.images), *(n // 4 for n in second.images[0].shape[1:3])]])
    inputs["video_grid_thw"] = grid
    assert second.text == transformers.Qwen2VLProcessor.replace_video_token(processor, inputs, 0)


# Frames, and how many a second. The last have more positions in time than in space.
VIDEOS: list[list[tuple[int, float]]] = [[(1, 2.0)], [(4, 9.0), (5, 12.0)], [(9, 1.0), (2, 1.0)]]


def positions(ids: list[int], grids: list[tuple[int, int, int]], steps: list[float]) -> np.ndarray:
    """Where tokens are along each axis, as the paper of Qwen2-VL has it: what follows a video comes
    after the last position that it has along any axis."""
    out, at, i, left = [], 0, 0, list(zip(grids, steps, strict=True))
    while i < len(ids):
        if ids[i] != VIDEO:
            out.append((at, at, at))
            at, i = at + 1, i + 1
            continue
        (t, h, w), step = left.pop(0)
        own = [
            (at + int(a * step), at + b, at + c)
            for a in range(t)
            for b in range(h)
            for c in range(w)
        ]
        out += own
        at, i = max(map(max, own)) + 1, i + len(own)
    return np.array(out).T


def video_logits(
    name: str, model: Any, ids: list[int], given: list[tuple[Any, float]]
) -> np.ndarray:
    """What transformers computes of videos."""
    rows = [GRID.patches(image) for seen, _ in given for image in seen.images]
    shapes = [(len(seen.images), *seen.images[0].shape[1:3]) for seen, _ in given]
    grids = [(t, h // SIDE, w // SIDE) for t, h, w in shapes]
    steps = [4 * 2 / rate if name == "qwen2_5_vl" else 1.0 for _, rate in given]
    more: dict[str, Any] = {
        "mm_token_type_ids": torch.tensor([[2 * (i == VIDEO) for i in ids]]),
        "video_grid_thw": torch.tensor([(t, 2 * h, 2 * w) for t, h, w in grids]),
    }
    if name == "qwen3_vl":  # each patch of frames is on its own
        grids, steps = (
            [(1, h, w) for t, h, w in grids for _ in range(t)],
            [1.0] * sum(t for t, *_ in grids),
        )
    if name == "qwen2_5_vl":
        more["second_per_grid_ts"] = torch.tensor([2 / rate for _, rate in given])
    where = torch.from_numpy(positions(ids, grids, steps))[:, None]
    found = model.model.get_rope_index(torch.tensor([ids]), **more)[0]
    # transformers 5 places what follows a video by its sides alone
    short = all((t - 1) * step < max(h, w) for (t, h, w), step in zip(grids, steps, strict=True))
    assert torch.equal(found, where) == short
    pixels = torch.from_numpy(np.concatenate(rows))
    with torch.inference_mode():
        out = model(
            input_ids=torch.tensor([ids]), pixel_values_videos=pixels, position_ids=where, **more
        )
    return out.logits[0].numpy()


@pytest.mark.parametrize("name", FAMILIES)
def test_from_frames_to_the_answer(name: str, tmp_path: Path) -> None:
    """Log-probabilities after one video and after two are those of transformers."""
    family = VISION_FAMILIES[name]
    model, tokenizer = (
        family.save(tmp_path),
        write_text_files(tmp_path, VIDEO_TOKENS, VIDEO_TEMPLATE),
    )
    params = octavo.SamplingParams(temperature=0, max_tokens=5, logprobs=0, ignore_eos=True)
    around = ("", "") if name == "qwen3_vl" else ("<begin>", "<end>")
    with octavo.LLM(str(tmp_path), memory="2GiB", threads=1, kv_dtype="f32") as llm:
        videos = llm.model.videos
        assert videos is not None
        for shown in VIDEOS:
            parts: list[dict[str, Any]] = []
            text, given = "user: ", []
            for count, rate in shown:
                parts += [
                    {"type": "video", "video": frames(count, count), "fps": rate},
                    {"type": "text", "text": "and"},
                ]
                seen = videos(clip(count, rate, seed=count), "")
                given.append((seen, rate))
                text += around[0] + seen.text + around[1] + "and"
            (found,) = llm.chat([{"role": "user", "content": parts}], params)
            ids = tokenizer.encode(text + "assistant: ").ids
            assert found.prompt_tokens == len(ids)
            logits = video_logits(name, model, ids + list(found.tokens), given)
            expected = torch.from_numpy(logits).log_softmax(-1)[len(ids) - 1 : -1]
            drawn = [float(row[token]) for row, token in zip(expected, found.tokens, strict=True)]
            assert np.abs(np.array(drawn) - found.logprobs).max() < 2e-3
