"""What an engine has done, and what it holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the start, and what is held now. busy_us: microseconds spent in steps."""

    running: int
    waiting: int
    blocks: int
    blocks_free: int
    blocks_cached: int
    steps: int
    busy_us: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    images_encoded: int = 0
    image_hits: int = 0  # images whose embeddings were kept from before
    image_us: int = 0  # microseconds spent on encoding
    image_bytes: int = 0  # of embeddings that are kept

    @property
    def blocks_held(self) -> int:
        """Blocks that running sequences hold."""
        return self.blocks - self.blocks_free - self.blocks_cached
