"""What can be said of an answer without its question: that it goes in circles."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

LONGEST = 32  # tokens (or words) of a circle
ROUNDS = 4  # so often it has to be gone
LEAST = 24  # tokens of all rounds together: "ha ha ha ha" is an answer


def repeating(answer: Sequence[Hashable]) -> bool:
    """Whether an answer ends in the same few tokens (or words) over and over.

    Looks at the end alone: who is caught in a circle does not leave it.
    """
    for period in range(1, min(LONGEST, len(answer) // ROUNDS) + 1):
        rounds = max(ROUNDS, -(-LEAST // period))
        tail = answer[-period * rounds :]
        if len(tail) == period * rounds and tail[period:] == tail[:-period]:
            return True
    return False
