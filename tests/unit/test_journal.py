"""What a long computation keeps: of one run at a time, and of nobody else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.compress.journal import Journal
from octavo.errors import WriteError


def test_what_was_being_made_is_made_again(tmp_path: Path) -> None:
    """Ctrl-C or a full disk while the result is written or moved: steps stay, the result goes."""
    for kind in ("folder", "file"):
        journal = Journal(tmp_path / "out", {"model": "a"})
        journal.save(0, {"x": np.zeros(4, np.float32)}, {"error": 1})
        if kind == "folder":
            journal.made.mkdir()
            (journal.made / "config.json").touch()
        else:
            journal.made.touch()
        journal.close()
        again = Journal(tmp_path / "out", {"model": "a"})
        assert again.has(0) and not again.made.exists() and again.differs is None
        again.remove()
        again.close()
        assert list(tmp_path.iterdir()) == []


def test_a_folder_of_somebody_else_stays(tmp_path: Path) -> None:
    folder = tmp_path / "out.journal"
    folder.mkdir()
    (folder / "diary.txt").write_text("mine")
    with pytest.raises(WriteError, match="out.journal holds something else .* name another output"):
        Journal(tmp_path / "out", {})
    assert [p.name for p in folder.iterdir()] == ["diary.txt"]
    (tmp_path / "file.journal").write_text("mine")
    with pytest.raises(WriteError, match="cannot write .*file.journal: File exists"):
        Journal(tmp_path / "file", {})
    assert (tmp_path / "file.journal").read_text() == "mine"


def test_one_run_at_a_time(tmp_path: Path) -> None:
    first = Journal(tmp_path / "out", {"recipe": "a"})
    first.save(0, {}, {})
    for identity in ("a", "b"):
        with pytest.raises(WriteError, match="another run writes .*out; wait for it"):
            Journal(tmp_path / "out", {"recipe": identity})
    assert first.has(0)
    first.close()
    second = Journal(tmp_path / "out", {"recipe": "b"})
    assert second.differs == "recipe" and not second.has(0)
    second.close()
