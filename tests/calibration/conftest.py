"""A small model as a file and as a folder, and text to calibrate with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from octavo.compress import calibrated
from tests.calibration.small import SMALL, save_changed


@pytest.fixture(scope="session")
def gguf(small_gguf: Callable[..., Path]) -> Path:
    return small_gguf(SMALL, Q.F32)


@pytest.fixture(scope="session")
def folder(gguf: Path) -> Path:
    """The same model as a folder, with a tokenizer."""
    out = gguf.with_name("small")
    return save_changed(gguf, out, lambda name, x: x)


@pytest.fixture(scope="session")
def text(gguf: Path) -> Path:
    """Words of a small vocabulary: inputs are far from independent."""
    rng, path = np.random.default_rng(3), gguf.with_name("text.jsonl")
    words = ["".join(rng.choice(list("abcdeth "), 9)) for _ in range(40)]
    lines = [json.dumps({"text": " ".join(rng.choice(words, 400))}) for _ in range(16)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrated, "SEQUENCES", 4)
    monkeypatch.setattr(calibrated, "LENGTH", 96)
