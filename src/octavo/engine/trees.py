"""Trees of drafts: several continuations of a sequence, verified in one step.

What they have in common is computed once. Each branch is a sequence of its own to attention, with
blocks of its own from the one on in which the computed tokens end; the blocks of the branch that is
drawn become the sequence's, the others are freed. So nothing is moved, and every row has the bits
that it has in a plain sequence.
"""

from __future__ import annotations

from typing import NamedTuple

from octavo.backends.base import BLOCK
from octavo.engine.cost import Acceptance
from octavo.engine.drafts import Proposal
from octavo.engine.kv import KVCache
from octavo.engine.scheduler import Draft, ScheduledSpan
from octavo.program import branches

MOST_FORKS = 3  # of a sequence
LEAST = 0.05  # chance of a fork that is looked at


class Fork(NamedTuple):
    """Another continuation. span: of the step; at: tokens that it has in common with the draft;
    chances: that each of the tokens after those, and all before it, are drawn."""

    span: int
    at: int
    proposal: Proposal
    chances: list[float]

    @property
    def tokens(self) -> list[int]:
        return self.proposal.tokens[self.at :]


def forks(
    span: int, main: Proposal, chances: list[float], others: list[Proposal], acceptance: Acceptance
) -> list[Fork]:
    """Where other proposals, and what a draft model found second best, part from the main one."""
    out: dict[tuple[int, int], Fork] = {}
    for at, (token, likely) in enumerate(main.second[: len(chances)]):
        before = chances[at - 1] if at else 1.0
        chance = min(before * likely, before - chances[at])
        single = Proposal(main.source, [*main.tokens[:at], token], 0, [0.0] * at + [likely])
        out[at, token] = Fork(span, at, single, [chance])
    for other in others:
        pairs = zip(other.tokens, main.tokens, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(other.tokens))
        own = acceptance.chances(other)
        if at >= len(chances) or at >= len(own):
            continue
        before = chances[at - 1] if at else 1.0
        first = min(before * own[at] / (own[at - 1] if at else 1.0), before - chances[at])
        found = [first * c / own[at] for c in own[at:]]
        out[at, other.tokens[at]] = Fork(span, at, other, found)
    likely_ones = [f for f in out.values() if f.chances[0] >= LEAST]
    return sorted(likely_ones, key=lambda f: -f.chances[0])[:MOST_FORKS]


def grow(
    kv: KVCache, span: ScheduledSpan, main: Draft, chosen: list[tuple[Fork, int]]
) -> ScheduledSpan:
    """A span that verifies a draft and the first tokens of forks of it, as far as they may come and
    there are free blocks."""
    sequence, tokens, rows = span.sequence, list(main.tokens), list(main.rows)
    parents, tables = list(range(-1, len(tokens) - 1)), list[list[int]]()
    sources = list(main.sources)
    end = span.start + span.length
    # Depth first: each fork leaves the path to the end of the one before.
    for fork, depth in sorted(chosen, key=lambda pair: -pair[0].at):
        if fork.at >= len(main.tokens):
            continue
        path = [*main.tokens[: fork.at], *fork.tokens[:depth]]
        more = sequence.sampling.rows_after(path)[fork.at :]
        blocks = kv.branch(sequence.kv, end + fork.at + len(more)) if more else None
        if blocks is None:
            continue
        parents += [fork.at - 1, *range(len(tokens), len(tokens) + len(more) - 1)]
        tokens += path[fork.at : fork.at + len(more)]
        rows += more
        tables.append(blocks)
        sources.append(fork.proposal.source)
    draft = Draft(tokens, rows, sources, parents, tables) if tables else main
    return span._replace(draft=draft)


def tally(draft: Draft, branch: int, accepted: int) -> list[tuple[str, int, int]]:
    """The source of each branch, with its tokens that were verified and those that were accepted.
    branch: that was drawn; accepted: tokens on its path."""
    if not draft.tables:
        return [(draft.sources[0], len(draft.tokens), accepted)]
    each = branches(draft.parents)
    common = min(accepted, len(each[branch].ancestors))  # these are the first branch's
    return [
        (source, b.count, accepted - common if i == branch else common if i == 0 else 0)
        for i, (source, b) in enumerate(zip(draft.sources, each, strict=True))
    ]


def keep_branch(kv: KVCache, span: ScheduledSpan, branch: int) -> None:
    """Gives a sequence the blocks of the branch that was drawn, and frees the others."""
    state, first = span.sequence.kv, span.start // BLOCK
    for number, blocks in enumerate(span.draft.tables, 1):
        if number == branch:
            blocks, state.blocks[first:] = state.blocks[first:], blocks
        kv.index.free(blocks)
