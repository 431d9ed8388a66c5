"""Settings of image processors that cannot be, in folders and in mmproj files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.checkpoint import Checkpoint
from octavo.checkpoint.files import MemoryFile
from octavo.errors import CheckpointError
from octavo.vision.families import load_preprocessor
from octavo.vision.resize import Framing

PADDED = {"do_pad": True, "image_processor_type": "LlavaImageProcessor"}
MEAN = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
NAMES: Any = SimpleNamespace(name=lambda _: "<image>")


@pytest.mark.parametrize(
    "settings",
    [
        {"resample": "x"},
        {"resample": None},
        {"resample": 6},
        {"image_mean": ["a", "b", "c"]} | PADDED,
        {"image_mean": 5} | PADDED,
        {"image_mean": [0.5]} | PADDED,
        {"image_mean": [1e300, 0.5, 0.5]} | PADDED,
    ],
    ids=str,
)
def test_framings_that_cannot_be(settings: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        Framing.of(settings)


def test_framings() -> None:
    assert Framing.of({"resample": 0}).resample == 0
    assert Framing.of({"image_mean": (0.48, 0.46, 0.41)} | PADDED).pad == (122, 117, 104)


def folder(settings: dict[str, Any]) -> Checkpoint:
    file = MemoryFile("preprocessor_config.json", json.dumps(settings | MEAN).encode)
    return Checkpoint(Path("m"), "hf", {}, {}, {file.name: file})


@pytest.mark.parametrize("key", ["size", "max_image_size"])
@pytest.mark.parametrize("value", [3, "x", [1], {"longest_edge": "x"}], ids=str)
def test_sizes_that_cannot_be(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"{key} of the image processor is"):
        load_preprocessor(
            folder({key: value}), NAMES, family="idefics3", placeholder=7, tokens=4, size=364
        )
