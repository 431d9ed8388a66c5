"""Videos in an engine: exact in any company, and each patch of frames encoded once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.backends.base import BLOCK
from octavo.engine.request import Request, SamplingParams
from octavo.errors import RequestError
from octavo.vision.clip import Clip
from octavo.vision.image import ImageInput
from octavo.vision.qwen_video import Qwen2VideoPreprocessor, Qwen3VideoPreprocessor, QwenFrames
from tests.engine.test_images import Loaded, _encode_for, queue, run
from tests.vision_models import VIDEO, VISION_FAMILIES, frames

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loaded]:
    return {name: Loaded(VISION_FAMILIES[name], tmp_path_factory.mktemp(name)) for name in FAMILIES}


def patches(name: str, seed: int, count: int, rate: float = 2.0) -> tuple[ImageInput, ...]:
    """Of the frames of a video."""
    framing, made = QwenFrames(8, 24, 256, 24 * 64, 3), frames(seed, count)
    clip = Clip(count, rate, lambda numbers: (made[n] for n in numbers), sampled=True)
    if name == "qwen3_vl":
        return Qwen3VideoPreprocessor("", "v", "", VIDEO, framing)(clip, "").images
    pace = 2.0 if name == "qwen2_5_vl" else 0.0
    return Qwen2VideoPreprocessor("v", VIDEO, framing, pace)(clip, "").images


def request(name: str, id: str, videos: list[tuple[Any, ...]], text: int = 9) -> Request:
    """Text, videos with a token before each (Qwen3-VL: before each patch of frames), text."""
    ids = [int(i) for i in np.random.default_rng(text).integers(3, 290, text)]
    images, offsets = list[ImageInput](), list[int]()
    for video in videos:
        for i, image in enumerate(patches(name, *video)):
            ids += [298] if i == 0 or name == "qwen3_vl" else []
            offsets.append(len(ids))
            ids += [VIDEO] * image.tokens
            images.append(image)
    params = SamplingParams(temperature=0, max_tokens=BLOCK + 2, logprobs=0, ignore_eos=True)
    return Request(id=id, prompt=[*ids, 7, 8], params=params, images=images, image_offsets=offsets)


@pytest.mark.parametrize("name", FAMILIES)
def test_exact_in_any_company(name: str, loaded: dict[str, Loaded]) -> None:
    m = loaded[name]
    requests = [
        request(name, "a", [(1, 3)]), request(name, "b", [(2, 4), (1, 3)], 40),
        m.request("c", (1,)), request(name, "d", [(0, 9, 0.5)], 21), request(name, "e", [(0, 9)], 21),
    ]  # fmt: skip
    alone = {r.id: run(m.engine(), [r])[r.id] for r in requests}
    # The same frames at another rate are other positions, which Qwen2.5-VL alone has.
    assert (alone["d"] == alone["e"]) == (name != "qwen2_5_vl")
    assert run(m.engine(), requests) == alone  # a batch
    assert run(m.engine(prefix_caching=False), requests) == alone
    warm = m.engine()
    assert run(warm, requests) == alone
    encoded = warm.stats().images_encoded
    assert run(warm, requests) == alone and warm.stats().images_encoded == encoded
    assert warm.stats().cached_tokens >= sum(len(r.prompt) - BLOCK for r in requests)
    # Room for the embeddings of two patches of frames, and chunks of fewer tokens than a video has
    most = max(queue(warm).encoder.bytes(i) for r in requests for i in r.images)
    assert run(m.engine(capacity=2 * most, budget=2 * m.family.tokens), requests) == alone
    largest = -(-max(len(r.prompt) + BLOCK + 2 for r in requests) // BLOCK)
    crowded = [m.engine(blocks=largest + more) for more in (1, 4)]
    for engine in crowded:
        _encode_for(queue(engine), 60.0)
        assert run(engine, requests) == alone
    assert sum(engine.stats().preemptions for engine in crowded) > 0
    sliced = m.engine()
    _encode_for(queue(sliced), 0.0)
    assert run(sliced, requests) == alone


def test_frames_are_encoded_once(loaded: dict[str, Loaded]) -> None:
    """A longer video that begins with the same frames has their patches already."""
    engine = loaded["qwen2_vl"].engine()
    run(engine, [request("qwen2_vl", "a", [(1, 4)])])
    assert engine.stats().images_encoded == 2
    longer = request("qwen2_vl", "b", [(1, 7)], 30)
    run(engine, [longer])
    assert engine.stats().images_encoded == 4


def test_frames_where_they_are_not_expected(loaded: dict[str, Loaded]) -> None:
    """A video's frames in an image's place, an image in a video's, and half a patch are refused."""
    m = loaded["qwen2_vl"]
    engine, video, image = m.engine(), request("qwen2_vl", "a", [(1, 2)]), m.request("b", (1,))
    half = ImageInput.of(video.images[0].array[:1], (70, 19), video.images[0].tokens, time=0)
    for images, wrong in (
        (image.images, video), (video.images, image), ([half], video),
    ):  # fmt: skip
        given = Request(
            id="x", prompt=wrong.prompt, params=wrong.params, images=images,
            image_offsets=wrong.image_offsets,
        )  # fmt: skip
        with pytest.raises(RequestError) as e:
            engine.add(given)
        assert e.value.param == "images"
    assert not engine.has_work
