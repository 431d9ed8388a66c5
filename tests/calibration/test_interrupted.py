"""Runs go on where they were cut off, and give the same bytes."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from octavo.checkpoint import open_checkpoint
from octavo.compress.jobs import Rounded
from octavo.compress.journal import Journal
from octavo.compress.quantize import job_of
from octavo.compress.recipe_file import find_recipe
from octavo.errors import WriteError
from tests.calibration.small import COMMAND, contents, of_runs, quantized


class Stop(BaseException):
    """What Ctrl-C raises, without its signal."""


def test_goes_on_after_control_c(folder: Path, text: Path, tmp_path: Path) -> None:
    whole = quantized(folder, "awq-4", tmp_path / "whole", text)
    told: list[str] = []
    for seen in (2, 9):  # while scales are found for eight inputs, and after a block
        left = seen

        def stop(size: int) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Stop

        job = job_of(open_checkpoint(folder), find_recipe("awq-4"), tmp_path / "cut", None, text)
        with pytest.raises(Stop):
            job.run(stop, of_runs(told))
        assert sorted(p.name for p in tmp_path.iterdir()) == ["cut.journal", "whole"]
    done = job_of(open_checkpoint(folder), find_recipe("awq-4"), tmp_path / "cut", None, text).run(
        say=of_runs(told)
    )
    assert done.resumed == 1 and told == ["goes on after 1 of 4 blocks"]
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert done.losses == whole.losses
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cut", "whole"]


def test_goes_on_after_sigkill(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # as many tokens as the command takes of a short text
    short = tmp_path / "short.jsonl"
    short.write_text("\n".join(text.read_text().split("\n")[:4]))
    out = str(tmp_path / "out")
    args = [str(folder), "--recipe", "gptq-4", "--output", out, "--data", str(short)]
    process = subprocess.Popen(
        [*COMMAND, *args], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    first = tmp_path / "out.journal" / "0000.json"
    while not first.exists():
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists() and first.exists()
    done = quantized(folder, "gptq-4", tmp_path / "out", short)
    assert done.resumed >= 1
    quantized(folder, "gptq-4", tmp_path / "whole", short)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize(("recipe", "name"), [("gptq-4", "out"), ("q4_0", "out.gguf")])
def test_goes_on_after_its_last_step(
    gguf: Path, folder: Path, text: Path, tmp_path: Path, recipe: str, name: str
) -> None:
    """Interrupted with the model made, before it has its place."""
    source, target = gguf if recipe == "q4_0" else folder, tmp_path / name

    def stop(journal: Journal) -> None:
        raise Stop

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Journal, "publish", stop)
        quantized(source, recipe, target, text)
    assert [p.name for p in tmp_path.iterdir()] == [f"{name}.journal"]
    if recipe == "q4_0":  # without data meanwhile: the journal stays
        job_of(open_checkpoint(gguf), find_recipe(recipe), target).run()
        target.unlink()
    assert quantized(source, recipe, target, text).resumed >= 4
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("recipe", ["gptq-4", "rtn-4"])
def test_a_gguf_file_that_cannot_be_written(
    recipe: str, folder: Path, text: Path, tmp_path: Path
) -> None:
    """What has taken long stays where the documents say, and the next run goes on after it."""
    out, data = tmp_path / "out.gguf", text if recipe == "gptq-4" else None

    def run(output: Path) -> Rounded:
        return job_of(open_checkpoint(folder), find_recipe(recipe), output, "gguf", data).run()

    def full(path: Path, *rest: Any) -> None:
        assert path == out
        raise WriteError("No space left on device")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(WriteError):
        patch.setattr("octavo.compress.conversion.write_gguf", full)
        run(out)
    assert [p.name for p in tmp_path.iterdir()] == ["out.gguf.journal"] * (recipe == "gptq-4")
    assert run(out).resumed == (4 if recipe == "gptq-4" else 0)
    assert [p.name for p in tmp_path.iterdir()] == ["out.gguf"]
    assert run(tmp_path / "whole.gguf").resumed == 0
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert open_checkpoint(out).metadata["general.name"] == folder.name


def test_begins_anew_where_something_differs(folder: Path, text: Path, tmp_path: Path) -> None:
    def cut(recipe: str, data: Path | None, told: list[str]) -> None:
        job = job_of(open_checkpoint(folder), find_recipe(recipe), tmp_path / "out", "gptq", data)

        def stop(size: int) -> None:
            raise Stop

        with pytest.raises(Stop):
            job.run(stop, of_runs(told))

    told: list[str] = []
    cut("gptq-4", text, told)
    assert told == []
    cut("gptq-3", text, told)
    assert told.pop().endswith("out.journal was of another recipe: begins anew")
    cut("gptq-3", None, told)
    assert told.pop().endswith("was of another text: begins anew")
    (tmp_path / "out.journal" / "journal.json").write_text("damaged")
    cut("gptq-3", None, told)
    assert told == []


def test_a_full_disk(folder: Path, text: Path, tmp_path: Path) -> None:
    """A file that cannot grow: a typed error, and the next run goes on."""

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (80_000, 80_000))

    out, short = tmp_path / "out", tmp_path / "short.jsonl"
    short.write_text("\n".join(text.read_text().split("\n")[:4]))
    args = [str(folder), "--recipe", "gptq-4", "--output", str(out), "--data", str(short)]
    failed = subprocess.run(
        [*COMMAND, *args], capture_output=True, text=True, preexec_fn=small_files
    )
    assert failed.returncode == 1 and "cannot write" in failed.stderr
    assert "Traceback" not in failed.stderr and not out.exists()
    assert sorted(os.listdir(tmp_path)) == ["out.journal", "short.jsonl"]
    assert subprocess.run([*COMMAND, *args], capture_output=True).returncode == 0
    assert sorted(os.listdir(tmp_path)) == ["out", "short.jsonl"]
