"""The result of rendering a chat template in a worker."""

from __future__ import annotations

import msgspec


class Rendered(msgspec.Struct, frozen=True):
    """The rendered text, or an error.

    invalid: the template cannot be compiled. refused: it raised an exception on purpose. failed:
    the name of another error. variables: names that it reads.
    """

    text: str = ""
    invalid: str = ""
    refused: str = ""
    failed: str = ""
    variables: list[str] = []
