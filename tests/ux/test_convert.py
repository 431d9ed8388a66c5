"""`octavo convert` and `octavo merge`: what they say, and that a good file is never lost."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Q

from octavo.checkpoint import open_checkpoint
from octavo.compress.folder_view import as_folder
from tests.families import FAMILIES, save_family
from tests.parity.test_peft import LLAMA, trained
from tests.small_models import Small, save_gguf
from tests.ux.test_command_line import OCTAVO, fails, octavo

SMALL = Small(heads=4, kv_heads=2, head_dim=64, hidden=256, ffn=512, layers=4, tied=False)


@pytest.fixture(scope="module")
def source(small_gguf: Callable[..., Path]) -> Path:
    return small_gguf(SMALL, Q.Q4_1)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in `model` with an adapter beside it."""
    root = tmp_path_factory.mktemp("adapter")
    torch.set_num_threads(1)
    trained(save_family(FAMILIES["llama"], root / "model"), root / "adapter", LLAMA, {})
    return root / "adapter"


def test_a_model_goes_there_and_back(source: Path, tmp_path: Path) -> None:
    """One screen for the summary, a file for the rest, exit code 0; the result answers."""
    folder, report = tmp_path / "mlx", tmp_path / "report.json"
    first = octavo(
        "convert", str(source), "--output", str(folder), "--format", "mlx", "--report", str(report)
    )
    assert first.returncode == 0, first.stderr
    assert "every value is the same" in first.stdout and len(first.stdout.splitlines()) <= 20
    found = json.loads(report.read_text())
    assert found["lossless"] and len(found["tensors"]) == len(open_checkpoint(source).tensors)
    assert {t["error"] for t in found["tensors"]} == {0.0}
    back = octavo("convert", str(folder), "--output", str(tmp_path / "back.gguf"), "--json")
    assert json.loads(back.stdout)["lossless"]
    assert (tmp_path / "back.gguf").stat().st_size < 1.2 * source.stat().st_size
    said = octavo("generate", str(tmp_path / "back.gguf"), "--prompt", "th", "--max-tokens", "4")
    assert said.returncode == 0, said.stderr


def test_what_is_lost_is_said(source: Path, tmp_path: Path) -> None:
    result = octavo("convert", str(source), "--output", str(tmp_path / "folder"))
    assert result.returncode == 0, result.stderr
    assert "relative error up to" in result.stdout and "tensors have changed" in result.stdout
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert (config["model_type"], config["torch_dtype"]) == ("llama", "bfloat16")


def test_wrong_names_are_refused(source: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert "is gguf already" in fails(2, "convert", str(source), "--output", out + ".gguf")
    assert "--output" in fails(2, "convert", str(source), "--output", "x.gguf", "--format", "mlx")
    assert ".gguf" in fails(2, "convert", str(source), "--output", out, "--format", "gguf")
    assert "exactly" in fails(2, "convert", str(source), "--output", out, "--format", "awq")
    fails(2, "convert", str(source), "--output", out, "--format", "onnx")
    fails(3, "convert", str(tmp_path / "none.gguf"), "--output", out)
    assert not (tmp_path / "out").exists()


def test_what_is_there_stays(source: Path, tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "model.gguf"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    file.write_text("mine")
    assert "not empty" in fails(1, "convert", str(source), "--output", str(folder))
    assert octavo("convert", str(source), "--output", str(tmp_path / "a")).returncode == 0
    given = ("convert", str(tmp_path / "a"), "--output", str(file))
    assert "--force" in fails(2, *given)
    assert (file.read_text(), (folder / "notes.txt").read_text()) == ("mine", "mine")
    assert octavo(*given, "--force").returncode == 0
    assert len(open_checkpoint(file).tensors) == len(open_checkpoint(source).tensors)


@pytest.mark.parametrize("format", ["safetensors", "mlx"])
def test_a_full_disk_leaves_nothing(source: Path, tmp_path: Path, format: str) -> None:
    """A file that cannot grow stands for a disk that is full: the same error of the same call."""

    def little() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    command = ["convert", str(source), "--output", str(tmp_path / "out"), "--format", format]
    result = subprocess.run(
        [*OCTAVO, *command], capture_output=True, text=True, preexec_fn=little, check=False
    )
    assert result.returncode == 1
    assert "\nerror: cannot write" in result.stderr and "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sent", "ends"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 130)]
)
def test_a_signal_leaves_the_old_file(sent: signal.Signals, ends: int, tmp_path: Path) -> None:
    """While the new file is being written: the old one is whole, and the next run succeeds. What is
    half written goes where the process can remove it."""
    wide = Small(heads=8, kv_heads=4, head_dim=64, hidden=512, ffn=2048, layers=3, tied=False)
    save_gguf(wide, tmp_path / "wide.gguf", Q.Q8_0)
    assert (
        octavo("convert", str(tmp_path / "wide.gguf"), "--output", str(tmp_path / "a")).returncode
        == 0
    )
    target = tmp_path / "out.gguf"
    target.write_text("old")
    command = ["convert", str(tmp_path / "a"), "--output", str(target), "--force"]
    process = subprocess.Popen([*OCTAVO, *command], stderr=subprocess.DEVNULL)
    part = tmp_path / ".out.gguf.octavo-part"
    while not (part.exists() and part.stat().st_size > 100_000):
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(sent)
    assert process.wait() == ends
    assert target.read_text() == "old" and part.exists() == (sent == signal.SIGKILL)
    assert octavo(*command).returncode == 0
    assert not part.exists()
    assert len(open_checkpoint(target).tensors) == len(
        open_checkpoint(tmp_path / "wide.gguf").tensors
    )


def test_merge(adapter: Path, tmp_path: Path) -> None:
    model = adapter.parent / "model"
    given = ("merge", str(model), "--lora", str(adapter), "--output")
    result = octavo(*given, str(tmp_path / "merged"), "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["layers"] == 21  # seven in each of three
    assert (
        open_checkpoint(tmp_path / "merged").tensors.keys() == open_checkpoint(model).tensors.keys()
    )
    assert "not empty" in fails(1, *given, str(tmp_path / "merged"))
    assert "folder" in fails(2, *given, str(tmp_path / "merged.gguf"))
    fails(3, "merge", str(model), "--lora", str(tmp_path / "none"), "--output", str(tmp_path / "x"))
    fails(2, "merge", str(model), "--output", str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()


def test_a_view_of_a_damaged_vocabulary_is_refused(source: Path, tmp_path: Path) -> None:
    """The tokenizer's files are made while the folder is written; their error leaves nothing."""
    from dataclasses import replace

    from octavo.compress.conversion import Conversion
    from octavo.errors import CheckpointError

    checkpoint = open_checkpoint(source)
    metadata = {**checkpoint.metadata, "tokenizer.ggml.merges": ["abc"]}
    job = Conversion(replace(checkpoint, metadata=metadata), tmp_path / "out", "safetensors")
    with pytest.raises(CheckpointError, match="two parts"):
        job.run()
    assert list(tmp_path.iterdir()) == []
    assert as_folder(checkpoint).files.keys() >= {"tokenizer.json"}
