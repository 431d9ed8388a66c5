"""Blocks of a prompt by numbers that say all that is before them, too.

Engines and what routes to them make the same numbers of the same tokens. Two blocks may have equal
numbers by chance, or by somebody's will: a request then goes where its prefix is not, and nothing
else happens, since engines compare tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate
from zlib import crc32


@lru_cache(1024)
def root(salt: str) -> int:
    """What the chain of a prompt begins with: prefixes are shared within a salt."""
    return int.from_bytes(blake2b(salt.encode(), digest_size=7).digest())


def link(parent: int, block: Sequence[int] | int) -> int:
    """The number of a block after another, the same in every process: hashes of numbers are."""
    return hash((parent, block))


def chain(tokens: Sequence[int], block: int, salt: str = "") -> tuple[int, ...]:
    """The numbers of the whole blocks of a prompt."""
    return _chained(root(salt), zip(*[iter(tokens)] * block, strict=False))


def text_chain(text: bytes, block: int, salt: str = "") -> tuple[int, ...]:
    """The numbers of the whole blocks of a text, of so many bytes each."""
    return chain_sums(text_sums(text, block), salt)


def text_sums(text: bytes, block: int) -> tuple[int, ...]:
    """A number for each whole block of a text, of so many bytes each, by what is in it."""
    return tuple(crc32(text[i * block : (i + 1) * block]) for i in range(len(text) // block))


def chain_sums(sums: Sequence[int], salt: str = "") -> tuple[int, ...]:
    """The numbers of blocks that `text_sums` has looked at."""
    return _chained(root(salt), sums)


def _chained(start: int, blocks: Iterable[Sequence[int] | int]) -> tuple[int, ...]:
    numbers: Iterator[int] = accumulate(blocks, link, initial=start)
    next(numbers)
    return tuple(numbers)
