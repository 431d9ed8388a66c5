"""Names of prompts that say their blocks: `model.count.numbers`.

Upstreams tell what they hold of prompts by these names (`server/cache_events.py`), so that every
gateway knows which blocks these are, whoever has sent them. count: blocks of the prompt; numbers:
of the leading ones, in base64.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote, unquote

import numpy as np

from octavo.backends.base import BLOCK
from octavo.engine.block_changes import CachedPrompt

NAMED = 700  # blocks at most: 90,000 tokens, about
MOST_MODEL = 400  # characters


def name_prompt(model: str, blocks: Sequence[int]) -> str:
    """The name of a prompt for a model, "" for one that has no block, or no such name."""
    called = quote(model, safe="")
    if not blocks or len(called) > MOST_MODEL:
        return ""
    numbers = np.array(blocks[:NAMED], "<i8").tobytes()
    return f"{called}.{len(blocks)}.{b64encode(numbers).decode()}"


@dataclass(frozen=True)
class NamedPrompt:
    """What a name says. count: blocks of the prompt, of which `blocks` are the first."""

    model: str
    count: int
    blocks: tuple[int, ...]

    @classmethod
    def of(cls, name: str) -> NamedPrompt:
        """Raises ValueError for a name that no gateway gives."""
        *called, count, data = name.split(".")
        blocks = np.frombuffer(b64decode(data, validate=True), "<i8").tolist()
        return cls(unquote(".".join(called)), int(count), tuple(blocks))

    def held(self, told: CachedPrompt) -> int:
        """How many leading blocks an upstream holds."""
        whole = told.cached + BLOCK > told.tokens  # what is missing fills no block
        share = self.count if whole else self.count * told.cached // max(told.tokens, 1)
        return min(share, len(self.blocks))
