"""The whole backend with its kernels in Triton's interpreter, beside the operations in torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from octavo.backends.cuda.probe import HOST
from tests.cuda.loaded import load, logits, open_program
from tests.families import FAMILIES, save_family
from tests.small_models import Small, save_gguf

CLOSE = 6e-2  # of the largest logit: the interpreter stores bf16 up to a unit off, in every layer
SMALL = {
    "q4_0": Small(heads=4, kv_heads=2, head_dim=16, layers=1),
    "q4_k": Small(heads=4, kv_heads=1, head_dim=64, hidden=256, ffn=256, layers=1),
}


def compare(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in two parts, by both."""
    program = open_program(path)
    ids = np.random.default_rng(7).integers(3, 320, 24).tolist()
    found = {}
    for way in ("torch", "interpreter"):
        monkeypatch.setenv(HOST, way)
        executable = load(program, path, tokens=32, blocks=4)
        parts = [logits(executable, ids[:17]), logits(executable, ids[17:], 17)]
        found[way] = np.concatenate(parts)
    expected = found["torch"]
    difference = np.abs(found["interpreter"] - expected).max() / np.abs(expected).max()
    print(f"largest difference {difference:.1e}")
    assert difference <= CLOSE


@pytest.mark.parametrize("kind", SMALL)
def test_formats(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    save_gguf(SMALL[kind], path, getattr(Q, kind.upper()))
    compare(path, monkeypatch)


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_families(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_family(FAMILIES[name], tmp_path)
    compare(tmp_path, monkeypatch)
