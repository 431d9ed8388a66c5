"""What is stored of responses, files and batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.errors import UsageError
from octavo.server.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with_files = Store(tmp_path)
    yield with_files
    with_files.close()


def test_a_damaged_file_is_named_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "octavo.sqlite3"
    file.write_text("garbage " * 100)
    for _ in range(2):  # the folder is free again
        with pytest.raises(UsageError, match=r"octavo\.sqlite3 cannot be used: file is not a"):
            Store(tmp_path)
    assert file.read_text() == "garbage " * 100
    file.unlink()
    file.mkdir()
    with pytest.raises(UsageError, match="cannot be used"):
        Store(tmp_path)


def test_what_changes_stays_where_it_is_listed(store: Store) -> None:
    """Also among those of the same second."""
    batches = [
        {"id": id, "object": "batch", "created_at": 1, "status": "validating"} for id in "abc"
    ]
    for batch in batches:
        store.put_object("me", batch)
    batches[0]["status"] = "completed"
    store.put_object("me", batches[0])
    assert store.objects("me", "batch") == batches[::-1]
    assert [batch["id"] for _, batch in store.unfinished_batches()] == ["c", "b"]
