"""The inputs that a program declares: what a step may give it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Input:
    """An array of a step. `shape`: T are the step's tokens, E those with embeddings of their own.

    An optional input may be left out of any step.
    """

    name: str
    type: Literal["int32", "float32"]
    shape: tuple[str | int, ...]
    optional: bool = False


IDS = Input("ids", "int32", ("T",))
POSITIONS = Input("positions", "int32", ("T",))
# Segment of each token; left out: 0.
TOKEN_TYPE_IDS = Input("token_type_ids", "int32", ("T",), optional=True)
# The token that each token follows, for trees of candidates (tree.py); left out: the one before.
PARENTS = Input("parents", "int32", ("T",), optional=True)

# How many later tokens of its sequence each token sees as well, as those of an image do.
REACH = Input("reach", "int32", ("T",), optional=True)

# Number of each token's segment, which ascends within a sequence (see Attention).
SEGMENTS = Input("segments", "int32", ("T",))


def coordinates(axes: int) -> Input:
    """Where each token is along each axis, for rotations (see Rope); left out: its position along
    all of them."""
    return Input("coordinates", "int32", (axes, "T"), optional=True)


def embeddings(width: int) -> Input:
    """Rows that replace the embeddings of some tokens, such as an image's."""
    return Input("embeddings", "float32", ("E", width), optional=True)


def features(width: int) -> Input:
    """Rows that are given for every token."""
    return Input("embeddings", "float32", ("T", width))
