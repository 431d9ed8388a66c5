"""Everything here computes without a GPU."""

from __future__ import annotations

import pytest

from tests.cuda.loaded import on_host


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    on_host(monkeypatch)
