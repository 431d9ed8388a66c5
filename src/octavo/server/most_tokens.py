"""A header that says after how many computed tokens, the prompt's among them, a text ends.

`octavo gateway` sends it where a key has no more: only the server knows what is in its cache, and
what a token is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from octavo.errors import InvalidValue

MOST_TOKENS = "x-most-tokens"
DIGITS = 15
Covers = Callable[[int], bool]  # whether a request may go on after so many computed tokens


def read_most(headers: Mapping[str, str]) -> int | None:
    """What a request's headers say of it. Raises InvalidValue."""
    if (text := headers.get(MOST_TOKENS)) is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= DIGITS and int(text)):
        raise InvalidValue(f"{MOST_TOKENS} is a number of tokens, 1 or more", MOST_TOKENS)
    return int(text)


def within(most: int | None, covers: Covers | None) -> Covers | None:
    """Both bounds of a request, if it has any."""
    if most is None:
        return covers
    return lambda used: used < most and (covers is None or covers(used))
