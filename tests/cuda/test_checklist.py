"""The list of what a GPU shows first, on the CPU with a tiny shape."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.gpu_checklist import PIECES, SERVE, main

from octavo.backends.cuda.probe import HOST


def test_a_server_on_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST, "torch")
    done = subprocess.run([sys.executable, SERVE, "tiny"], stdout=subprocess.PIPE, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["item"] for line in lines] == ["start", "start", "stream", "streams"]
    assert lines[-1]["same"] and lines[-1]["streams"] == 3


def test_all_pieces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, svg = tmp_path / "out.jsonl", tmp_path / "out.svg"
    asked = [
        "limits",
        "bits",
        "speed",
        "kernels",
        "constraints",
        "baseline",
        "--random",
        "tiny",
        "--device",
        "cpu",
    ]
    assert main([*asked, "--out", str(out), "--svg", str(svg)]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    compared = [line["same"] for line in lines if "same" in line]
    assert len(compared) > 10 and all(compared)
    items = {line["item"] for line in lines}
    assert items == {
        "versions", "copy", "product", "linear", "chunks", "together", "beside a prompt", "made",
        "decode", "prefill", "kernel", "slices", "exactness", "baseline decode", "baseline prefill",
    }  # fmt: skip
    assert svg.read_text().count("<rect") == 2
    capsys.readouterr()
    assert main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(PIECES)
