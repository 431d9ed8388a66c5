"""Places of results are looked at before work begins, and what lies there is left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType as Q

from octavo.checkpoint import open_checkpoint
from octavo.checkpoint.base import TensorType
from octavo.checkpoint.places import (
    check_new,
    check_new_file,
    check_report,
    held,
    locked,
    part_of,
)
from octavo.checkpoint.writer import NewTensor, replacing, write_folder, write_gguf
from octavo.cli.budget import search_mix
from octavo.cli.convert import convert
from octavo.cli.evaluate import evaluate
from octavo.compress.conversion import Conversion
from octavo.compress.merge import Merge
from octavo.compress.quantize import job_of
from octavo.compress.recipe_file import find_recipe
from octavo.errors import OctavoError, UsageError, WriteError
from tests.small_models import Small

SMALL = Small(heads=4, kv_heads=2, head_dim=32, hidden=128, ffn=256, layers=2, tied=False)


@pytest.fixture(scope="module")
def gguf(small_gguf: Callable[..., Path]) -> Path:
    return small_gguf(SMALL, Q.F32)


@pytest.fixture(scope="module")
def folder(gguf: Path) -> Path:
    out = gguf.with_name("folder")
    Conversion(open_checkpoint(gguf), out, "safetensors").run()
    return out


def test_new_folders(tmp_path: Path) -> None:
    for name in (".", "/", "..", "a/.."):
        with pytest.raises(UsageError, match="is no name for a new folder"):
            check_new(Path(name))
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "none")
    for name in ("file", "link"):
        with pytest.raises(WriteError, match=f"{name} is no folder; name a new one"):
            check_new(tmp_path / name)
    with pytest.raises(WriteError, match="cannot write .*x: .*file: Not a directory; name another"):
        check_new(tmp_path / "file" / "deep" / "x")
    check_new(tmp_path / "a" / "b" / "c")


def test_new_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.gguf").mkdir()
    with pytest.raises(WriteError, match="is a folder; name a new file"):
        check_new_file(tmp_path / "x.gguf")
    with pytest.raises(UsageError, match="is no name for a new file"):
        check_report(Path())
    with pytest.raises(WriteError, match="No such file or directory; make the folder first"):
        check_report(tmp_path / "none" / "r.json")
    monkeypatch.setattr(os, "access", lambda *_: False)
    for check in (check_new_file, check_new, check_report):
        with pytest.raises(WriteError, match="Permission denied; name another place"):
            check(tmp_path / "y")


def test_a_file_makes_its_folders(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a" / "b" / "x.gguf", {}, {})
    assert [p.name for p in (tmp_path / "a" / "b").iterdir()] == ["x.gguf"]


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    """A user's own NAME.part; what a killed run has left is replaced, whatever it was."""
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "diary").touch()
    (tmp_path / "x.part").write_text("mine")
    part_of(tmp_path / "out").touch()
    part_of(tmp_path / "x").mkdir()
    write_folder(tmp_path / "out", {}, {})
    with replacing(tmp_path / "x") as file:
        file.write(b"new")
    assert (tmp_path / "x.part").read_text() == "mine" and (tmp_path / "out.part/diary").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "out.part", "x", "x.part"]


def test_one_run_at_a_time(tmp_path: Path) -> None:
    """The second is refused at once, and the first one's file is what appears."""
    file, folder = tmp_path / "x.gguf", tmp_path / "out"
    refused = "another run writes .*{}; wait for it, or name another output"
    with replacing(file) as first:
        first.write(b"fir")
        with pytest.raises(WriteError, match=refused.format("x.gguf")):
            write_gguf(file, {}, {})
        first.write(b"st")
    assert file.read_bytes() == b"first"

    def second() -> np.ndarray:
        with pytest.raises(WriteError, match=refused.format("out")):
            write_folder(folder, {"n": 2}, {})
        return np.zeros(1, np.float32)

    write_folder(folder, {"n": 1}, {"a": NewTensor(TensorType.F32, (1,), second)})
    assert json.loads((folder / "config.json").read_bytes()) == {"n": 1}
    with locked(tmp_path / "kept", file):
        with pytest.raises(WriteError, match=refused.format("x.gguf")):
            with locked(tmp_path / "kept", file):
                pass
    with locked(tmp_path / "kept", file):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept", "out", "x.gguf"]


def test_what_the_next_run_writes_stays(tmp_path: Path) -> None:
    """It may begin in the moment in which the last one's file has moved to its place."""
    place, output = tmp_path / "part", tmp_path / "x"
    with held(place, output):
        place.replace(output)
        place.write_text("of the next one")
    assert place.read_text() == "of the next one"


WRITES = """
import sys, time
from pathlib import Path
from octavo.checkpoint.writer import replacing
with replacing(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    print("begun", flush=True)
    time.sleep(600)
"""


def test_a_killed_run_is_in_nobodys_way(tmp_path: Path) -> None:
    path = tmp_path / "x"
    run = [sys.executable, "-c", WRITES, str(path)]
    with subprocess.Popen(run, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        with pytest.raises(WriteError, match="another run writes"), replacing(path):
            pass
        process.kill()
    assert part_of(path).read_bytes() == b"half"
    with replacing(path) as file:
        file.write(b"whole")
    assert path.read_bytes() == b"whole" and [p.name for p in tmp_path.iterdir()] == ["x"]


def test_jobs_refuse_places(gguf: Path, folder: Path, tmp_path: Path) -> None:
    """When they are made: before a bar, a journal, and texts that a model would write."""
    one, many, data = open_checkpoint(gguf), open_checkpoint(folder), Path("self")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "f.gguf").mkdir()
    before = sorted(folder.rglob("*"))
    for refused in (
        lambda: job_of(many, find_recipe("gptq-4"), tmp_path / "full", None, data),
        lambda: job_of(many, find_recipe("rtn-4"), tmp_path / "full" / "file"),
        lambda: job_of(many, find_recipe("rtn-4"), Path()),
        lambda: job_of(many, find_recipe("gptq-4"), folder / "small", None, data),
        lambda: job_of(one, find_recipe("q4_0"), tmp_path / "f.gguf", None, data),
        lambda: Conversion(one, Path("/"), "safetensors"),
        lambda: Conversion(many, tmp_path / "f.gguf", "gguf"),
        lambda: Conversion(many, folder / "x" / "y.gguf", "gguf"),
        lambda: Merge(many, [], folder / "x"),
        lambda: Merge(many, [], tmp_path / "full"),
    ):
        with pytest.raises(OctavoError):
            refused()
    with pytest.raises(UsageError, match="lies in the folder of the model; name a place outside"):
        Merge(many, [], folder / "x" / ".." / "y")
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("recipe", ["gptq-4", "awq-4", "smoothquant", "distilled-4"])
def test_without_torch(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """Known at once, and again when it is run: a journal of an earlier run stays."""
    job = job_of(open_checkpoint(folder), find_recipe(recipe), tmp_path / "out")
    monkeypatch.setitem(sys.modules, "octavo.backends.torch.spans", None)
    kept = tmp_path / "out.journal"
    kept.mkdir()
    with pytest.raises(UsageError, match="torch, which is not installed"):
        job_of(open_checkpoint(folder), find_recipe(recipe), tmp_path / "x")
    with pytest.raises(UsageError, match="torch, which is not installed"):
        job.run()
    assert list(tmp_path.iterdir()) == [kept] and not any(kept.iterdir())


def test_reports_are_refused_before_work(gguf: Path, tmp_path: Path) -> None:
    none, out = str(tmp_path / "none" / "report"), str(tmp_path / "out")
    for command, args in (
        (evaluate, ["no/model", "--against", "no/other", "--json", none]),
        (evaluate, ["no/model", "--against", "no/other", "--html", none]),
        (convert, [str(gguf), "--output", out, "--report", none]),
    ):
        error = CliRunner().invoke(command, args).exception
        assert isinstance(error, WriteError) and "make the folder first" in str(error)
    with pytest.raises(WriteError, match="make the folder first"):
        search_mix(
            open_checkpoint(gguf), tmp_path / "x.gguf", None, False, typed="x", budget="1MB", context=None,
            concurrency=None, max_kl=None, chart=Path(none),
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_kept_figures_are_refused_before_work(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    words = [str(gguf), "--against", str(gguf), "--save"]
    error = CliRunner().invoke(evaluate, words).exception
    assert isinstance(error, WriteError) and "small.gguf.quality.json" in str(error)
