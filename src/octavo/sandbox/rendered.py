"""What comes back from rendering a chat template."""

from __future__ import annotations

import msgspec


class Rendered(msgspec.Struct, frozen=True):
    """A conversation as text, or what is wrong.

    invalid: it cannot be compiled; refused: it says so itself; failed: what it ran into.
    variables: all that it takes.
    """

    text: str = ""
    invalid: str = ""
    refused: str = ""
    failed: str = ""
    variables: list[str] = []
