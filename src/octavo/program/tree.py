"""Trees of candidate tokens: several continuations of one sequence that share prefixes.

A tree is a list of parents: the index of the token that each token follows, or -1 if it follows
what came before the tree. Tokens come depth first: each follows the token before it, or one of
that token's ancestors, or nothing. A token's position is its depth, and it sees its ancestors and
itself, as if its path from the root were a plain sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Branch:
    """Tokens `[first, first + count)` of a tree, each the child of the one before; the last is a
    leaf. ancestors: the tokens on the path from the root to the first, in order."""

    first: int
    count: int
    ancestors: tuple[int, ...]


def branches(parents: Sequence[int]) -> list[Branch]:
    """The branches of a tree, one for each leaf. Raises ValueError unless it is depth first."""
    out: list[Branch] = []
    path: list[int] = []
    for token, parent in enumerate(parents):
        if path and parent == path[-1]:
            out[-1] = Branch(out[-1].first, out[-1].count + 1, out[-1].ancestors)
        else:
            while path and path[-1] != parent:
                path.pop()
            if not path and parent != -1:
                raise ValueError(f"token {token} follows {parent}: the tree is not depth first")
            out.append(Branch(token, 1, tuple(path)))
        path.append(token)
    return out
