"""What one HTTP request asks of the engine, and which of its results are the answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec

from octavo.engine.request import Request, SamplingParams
from octavo.server.decoding import ReplyFormat
from octavo.server.generation import Piece, TokenInfo
from octavo.text import Tokenizer
from octavo.text.structure import Structure


@dataclass(frozen=True)
class Job:
    """`n` choices for each of `prompts`, the most likely of `best_of` if that is more."""

    route: str
    prompts: list[list[int]]
    params: SamplingParams
    n: int
    best_of: int = 0
    echo: bool = False
    reply: ReplyFormat | None = None
    structure: Structure | None = None  # of every choice

    @property
    def chat(self) -> bool:
        return self.route == "chat"

    @property
    def made(self) -> int:
        """Choices computed for each prompt."""
        return max(self.n, self.best_of)

    def tuned(self, requests: list[Request]) -> list[Request]:
        """The requests with the log-probabilities that ranking needs."""
        if self.made == self.n or self.params.logprobs is not None:
            return requests
        return [
            msgspec.structs.replace(r, params=msgspec.structs.replace(r.params, logprobs=0))
            for r in requests
        ]

    def best(self, choices: list[list[Piece]]) -> list[list[Piece]]:
        """The choices to return: of each prompt's those with the best log-probability per token."""
        if self.made == self.n:
            return choices
        out = []
        for first in range(0, len(choices), self.made):
            own = choices[first : first + self.made]
            out += sorted(own, key=_rank)[: self.n]
        return out


def _rank(pieces: list[Piece]) -> float:
    scores = [t.logprob for p in pieces for t in p.tokens if t.logprob is not None]
    return -sum(scores) / max(1, len(scores))


async def echoed(
    pieces: AsyncGenerator[Piece, None], tokenizer: Tokenizer, job: Job
) -> AsyncGenerator[Piece, None]:
    """Puts each prompt, with its log-probabilities if asked for, before its completion."""
    begun: set[int] = set()
    scored: dict[int, list[TokenInfo]] = {}  # by prompt: the texts of a beam search share theirs
    async with aclosing(pieces):
        async for piece in pieces:
            number = piece.choice // job.made
            if piece.prompt:
                scored[number] = piece.prompt
            wanted = job.params.prompt_logprobs is not None
            ready = not wanted or number in scored or len(job.prompts[number]) == 1
            if piece.choice not in begun and ready:
                begun.add(piece.choice)
                text = tokenizer.decode(job.prompts[number]) + piece.text
                piece = replace(piece, text=text, tokens=scored.get(number, []) + piece.tokens)
            yield piece
