"""The file of packed weights: a second start maps it and answers alike, a wrong file is no harm."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from octavo import _native
from octavo.checkpoint import Stored
from octavo.engine.constraint import TokenTable
from octavo.engine.events import Token
from octavo.engine.loader import load_executable, make_engine
from octavo.engine.open import open_model
from octavo.engine.plan import make_plan
from octavo.engine.request import Request, SamplingParams
from tests.small_models import Small, save_hf


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where packed weights go in this test."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    return tmp_path / "packed"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    save_hf(Small(), tmp_path / "model")
    return tmp_path / "model"


def answer(path: Path) -> list[int]:
    model = open_model(path)
    plan = make_plan(model.compiled, name="m", context=256, packed=True)
    engine = make_engine(model, load_executable(model, plan), plan, TokenTable([], [], [2]))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    engine.add(Request(id="a", prompt=list(range(3, 40)), params=params))
    events = [e for _ in range(20) if engine.has_work for e in engine.step()]
    return [e.token for e in events if isinstance(e, Token)]


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


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


TRAILER = 24  # magic, bytes used, sum


@pytest.mark.parametrize(
    "damage", ["cut", "foreign", "empty", "first", "middle", "last", "magic", "sum", "torn"]
)
def test_damaged_file_is_replaced(
    damage: str, folder: Path, small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where a single bit has changed, or a page never reached the disk."""
    first = answer(small)
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    used = len(whole) - TRAILER
    assert not caplog.records
    if damage == "torn":
        start = used // 3 & ~4095
        file.write_bytes(whole[:start] + bytes(4096) + whole[start + 4096 :])
    elif damage == "foreign":  # sound, but of another layout: a different amount of weights
        less = used - 64
        file.write_bytes(whole[:less] + whole[-24:-16] + less.to_bytes(8, "little") + whole[-8:])
    else:
        file.write_bytes({
            "cut": whole[: len(whole) // 2], "empty": b"", "first": flipped(whole, 0),
            "middle": flipped(whole, used // 2), "last": flipped(whole, used - 1),
            "magic": flipped(whole, used), "sum": flipped(whole, len(whole) - 1),
        }[damage])  # fmt: skip
    assert answer(small) == first
    assert file.read_bytes() == whole
    (record,) = caplog.records
    assert "damaged" in record.message and str(folder) not in record.message


def test_any_instruction_set_maps_it(
    folder: Path, small: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The layout is one for all of them."""
    files = set()
    for isa in _native.isas():
        monkeypatch.setenv("OCTAVO_ISA", isa)
        model = open_model(small)
        load_executable(model, make_plan(model.compiled, name="m", packed=True))
        (file,) = folder.iterdir()
        files.add((file.name, file.stat().st_ino, file.read_bytes()))
    assert len(files) == 1 and not caplog.records


def test_remains_of_a_process_that_died_are_removed(folder: Path, small: Path) -> None:
    answer(small)
    (file,) = folder.iterdir()
    file.unlink()
    mine, dead = (file.with_suffix(f".{n}") for n in (os.getppid(), 1 << 30))
    mine.touch()
    dead.touch()
    answer(small)
    assert set(folder.iterdir()) == {file, mine}


def test_changed_model_has_another_file(folder: Path, small: Path) -> None:
    answer(small)
    (old,) = folder.iterdir()
    (small / "model.safetensors").touch()
    answer(small)
    (new,) = folder.iterdir()
    assert new.name != old.name


def test_a_folder_that_cannot_be_made(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Packed weights are a cache: the model answers without them."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "kept"))
    expected = answer(small)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file" / "cache"))
    caplog.clear()
    assert answer(small) == expected
    assert [r.message for r in caplog.records if "packed weights are not kept" in r.message]
