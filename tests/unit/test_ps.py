"""Which processes are servers, by their command lines."""

from __future__ import annotations

import pytest

from octavo.cli.ps import served_model


@pytest.mark.parametrize(
    ("line", "model"),
    [
        ("/env/bin/octavo serve small", "small"),
        ("/env/bin/python /env/bin/octavo serve", "smollm2"),
        ("python3.12 -P -m octavo.cli.main serve small --name large", "large"),
        ("python3 -m octavo.cli.main --debug serve a b", "a, b"),
        ("octavo chat small", None),
        ("timeout 40 octavo serve small", None),  # whose child is the server
        ("/usr/bin/sudo /env/bin/octavo serve small", None),
        ("vi octavo serve", None),
    ],
)
def test_command_lines_of_servers(line: str, model: str | None) -> None:
    assert served_model(line.split()) == model


def test_a_process_without_a_command_line() -> None:
    """As those of the kernel."""
    assert served_model([]) is None
