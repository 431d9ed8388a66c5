"""Everything here computes without a GPU: in torch, or by kernels in Triton's interpreter, which
must be asked for before they are imported."""

from __future__ import annotations

import importlib.util
import os

import pytest

from tests.cuda.gpu import GPU, on_host

if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
if importlib.util.find_spec("triton") is None:  # CPU builds of torch do not bring it
    collect_ignore_glob = ["test_kernels_*.py", "test_compile.py"]
elif not GPU:
    from tests.cuda.rounding import round_to_nearest

    round_to_nearest()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    on_host(monkeypatch)
