from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGUFReader

from tests.api.server import Server, serving


@pytest.fixture(scope="module")
def server(smollm2: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for a module's tests."""
    with serving("smollm2", "--offline", log=tmp_path_factory.mktemp("server") / "log") as s:
        yield s


@pytest.fixture(scope="module")
def worse(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with one layer that hears its input louder."""
    path = tmp_path_factory.mktemp("worse") / "worse.gguf"
    shutil.copy(smollm2, path)
    tensors = {one.name: one.data for one in GGUFReader(path, "r+").tensors}
    tensors["blk.12.attn_norm.weight"][:] *= 1.5
    return path
