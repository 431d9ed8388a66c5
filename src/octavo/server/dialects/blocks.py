"""A reply as blocks, one after another: thoughts, text and calls, in the order they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from octavo.generate.reply import TextDelta

Kind = Literal["thoughts", "text", "call"]


@dataclass
class Block:
    """Number `index` of a reply. text: of a call, its arguments; id, name: of a call."""

    kind: Kind
    index: int
    id: str = ""
    name: str = ""
    text: str = ""


class Change(NamedTuple):
    """What a delta does to a block. text: that is added."""

    step: Literal["open", "add", "close"]
    block: Block
    text: str = ""


class Blocks:
    """Reads the deltas of one choice. all: its blocks so far."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open = False

    def push(self, delta: TextDelta) -> Iterator[Change]:
        """What a delta changes. The last block is closed with the end of the choice."""
        for kind, text in (("thoughts", delta.reasoning), ("text", delta.text)):
            if text:
                if not self._open or self.all[-1].kind != kind:
                    yield from self._begin(Block(kind, len(self.all)))  # type: ignore[arg-type]
                yield self._add(text)
        for call in delta.calls:
            if call.id is not None:
                yield from self._begin(Block("call", len(self.all), call.id, call.name or ""))
            if call.arguments:
                yield self._add(call.arguments)
        if delta.finish:
            yield from self._close()

    def _begin(self, block: Block) -> Iterator[Change]:
        yield from self._close()
        self.all.append(block)
        self._open = True
        yield Change("open", block)

    def _add(self, text: str) -> Change:
        block = self.all[-1]
        block.text += text
        return Change("add", block, text)

    def _close(self) -> Iterator[Change]:
        if self._open:
            self._open = False
            yield Change("close", self.all[-1])


def blocks(deltas: Iterable[TextDelta]) -> list[Block]:
    """The blocks of a whole choice."""
    reader = Blocks()
    for delta in deltas:
        for _ in reader.push(delta):
            pass
    return reader.all
