"""What an engine has done, and what it holds."""

from __future__ import annotations

import msgspec


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the start, and what is held now. busy_us: microseconds spent in steps.

    drafted, accepted: tokens of drafts by source (`octavo.engine.drafts`, `draft_model`,
    `self_draft`). speculation_lost_us: microseconds that drafts took more, to be looked for,
    written and verified, than plain steps would have for what was drawn. blocks_reached: that were
    ever used.
    prepared: parts of weights and of KV blocks that were written to memory ahead of their use.
    step_us: what a step without prompts takes now; prompt_token_ns: what a token of a prompt takes,
    with all that is computed beside it; 0 before that was measured. slowdown_permille: of what
    steps usually take.
    """

    running: int
    waiting: int
    blocks: int
    blocks_free: int
    blocks_cached: int
    blocks_reached: int
    steps: int
    busy_us: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    prepared: int
    preemptions: int
    step_us: int = 0
    slowdown_permille: int = 1000
    prompt_token_ns: int = 0
    images_encoded: int = 0
    image_hits: int = 0  # images whose embeddings were kept from before
    image_us: int = 0  # microseconds spent on encoding
    image_bytes: int = 0  # of embeddings that are kept
    grammars_compiled: int = 0
    grammar_us: int = 0  # microseconds spent on compiling, beside the steps
    drafted_forced: int = 0
    accepted_forced: int = 0
    drafted_prediction: int = 0
    accepted_prediction: int = 0
    drafted_lookup: int = 0
    accepted_lookup: int = 0
    drafted_recent: int = 0
    accepted_recent: int = 0
    drafted_draft: int = 0
    accepted_draft: int = 0
    drafted_self: int = 0
    accepted_self: int = 0
    speculation_lost_us: int = 0

    @property
    def blocks_held(self) -> int:
        """Blocks that running sequences hold."""
        return self.blocks - self.blocks_free - self.blocks_cached
