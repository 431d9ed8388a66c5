"""A build on a machine without what it needs says in one sentence what to install."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def configure(folder: Path, **env: str) -> str:
    """The text of a configuration that must fail, its line breaks taken out."""
    cmake = shutil.which("cmake")
    assert cmake is not None
    command = [
        cmake,
        "-G",
        "Unix Makefiles",
        "-D",
        "CMAKE_MAKE_PROGRAM=/bin/true",
        "-S",
        str(ROOT),
        "-B",
        str(folder),
    ]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120,
        env={k: v for k, v in os.environ.items() if k != "CXX"} | env,
    )  # fmt: skip
    assert result.returncode != 0
    assert len(result.stderr.strip().splitlines()) <= 6
    return " ".join(result.stderr.split())


@pytest.mark.parametrize("missing", ["CXX", "PATH"])
def test_no_compiler(missing: str, tmp_path: Path) -> None:
    said = configure(tmp_path / "build", **{missing: str(tmp_path / "nothing")})
    assert "need a C++20 compiler, and none was found. Debian, Ubuntu: apt install g++" in said


def test_an_old_compiler(tmp_path: Path) -> None:
    """This host's compiler, which says that it is version 11."""
    old = tmp_path / "g++"
    old.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} -U__GNUC__ -D__GNUC__=11 "$@"\n')
    old.chmod(0o755)
    said = configure(tmp_path / "build", CXX=str(old))
    assert f"need GCC 12 or later, and {old} is 11" in said and "apt install g++" in said
