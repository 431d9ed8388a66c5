"""Everything here computes without a GPU: in torch, or by kernels in Triton's interpreter, which
must be asked for before they are imported."""

from __future__ import annotations

import importlib.util
import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"
if importlib.util.find_spec("triton") is None:  # CPU builds of torch do not bring it
    collect_ignore_glob = ["test_kernels_*.py", "test_compile.py"]
else:
    from tests.cuda.rounding import round_to_nearest

    round_to_nearest()

from tests.cuda.loaded import on_host


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    on_host(monkeypatch)
