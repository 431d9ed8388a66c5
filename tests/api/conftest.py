from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.api.server import Server, serving


@pytest.fixture(scope="module")
def server(smollm2: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for a module's tests."""
    with serving("smollm2", "--offline", log=tmp_path_factory.mktemp("server") / "log") as s:
        yield s
