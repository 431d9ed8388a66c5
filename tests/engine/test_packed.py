"""The file of packed weights: a second start maps it and answers alike, a wrong file is no harm."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.checkpoint import Stored

PROMPT = "The capital of France is"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where packed weights go in this test."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    return tmp_path / "packed"


def answer(path: Path) -> list[int]:
    llm = LLM(str(path), memory="1GiB", context=256, packed_cache=True)
    return llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12))[0].tokens


def test_second_start_maps(folder: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = answer(smollm2)
    (file,) = folder.iterdir()
    written = file.stat()

    read = Stored.raw

    def norms_only(self: Stored) -> np.ndarray:
        assert len(self.shape) == 1, f"{self.name} was read"
        return read(self)

    with monkeypatch.context() as m:
        m.setattr(Stored, "raw", norms_only)
        assert answer(smollm2) == first
    assert file.stat().st_mtime_ns == written.st_mtime_ns


@pytest.mark.parametrize("damage", ["cut", "foreign", "empty"])
def test_damaged_file_is_replaced(damage: str, folder: Path, smollm2: Path) -> None:
    first = answer(smollm2)
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    if damage == "cut":
        file.write_bytes(whole[: len(whole) // 2])
    elif damage == "empty":
        file.write_bytes(b"")
    else:  # sound, but of another layout: a different amount of weights
        used = len(whole) - 16 - 64
        file.write_bytes(whole[:used] + whole[-16:-8] + used.to_bytes(8, "little"))
    assert answer(smollm2) == first
    assert file.read_bytes() == whole


def test_changed_model_has_another_file(folder: Path, smollm2: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model.gguf"
    shutil.copyfile(smollm2, copy)
    answer(copy)
    (old,) = folder.iterdir()
    copy.touch()
    answer(copy)
    (new,) = folder.iterdir()
    assert new.name != old.name
