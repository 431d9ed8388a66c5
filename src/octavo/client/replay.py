"""Which requests an engine is given, and again after one has died.

Replay is invisible to clients: a request's tokens depend on nothing but the request, so a new
engine, told which tokens were already given, continues with the very next one.

A request may be what an engine dies of. After a death all that it held are doubted; after a fault
of the process itself, or a second death, they are suspects: each runs alone until it has got past
where it was, so that one which brings the engine down does so alone, and is not tried again.
Requests that are no suspects wait until that is over.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from itertools import count

import msgspec

from octavo.engine.events import BeamText, Ended, PromptLogprobs, Token, TokenEvent, ends
from octavo.engine.limits import MAX_AHEAD
from octavo.engine.request import Request
from octavo.errors import RequestError

SUSPECT = 2  # doubt from which on a request runs alone
FUTILE = 2  # times alone in an engine that was killed, without a token, after which it is the cause


@dataclass(eq=False)
class Stream:
    """A request in flight. deadline: on the event loop's clock, as is due: when its first token is
    wanted, infinity for no time."""

    request: Request
    deadline: float | None
    due: float = math.inf
    events: asyncio.Queue[TokenEvent | RequestError] = field(default_factory=asyncio.Queue)
    given: list[int] = field(default_factory=list)
    prompt_logprobs: int = 0
    over: bool = False  # its last event has come
    found: list[BeamText] = field(default_factory=list)
    predicted: tuple[int, int] = (0, 0)  # tokens of the prediction, accepted and rejected
    before: tuple[int, int] = (0, 0)  # of these, by the time it was submitted
    name: str = ""  # of its submission, which is new each time; "": the engine does not have it
    doubt: int = 0
    futile: int = 0
    since: int = 0  # frames that had come when it was submitted
    start: int = 0  # tokens that had been given by then
    reached: int = 0  # frames that the submission took which a death ended, at most

    @classmethod
    def of(cls, request: Request, now: float) -> Stream:
        """A request that has come now."""
        deadline = None if request.timeout is None else now + request.timeout
        wanted = [s for s in (request.timeout, request.ttft) if s is not None]
        due = now + min(wanted, default=math.inf)
        return cls(request, deadline, due, given=list(request.resume))

    async def next(self) -> TokenEvent | RequestError:
        """The next event, or the passing of the deadline, which does not depend on the engine."""
        try:
            async with asyncio.timeout_at(self.deadline):
                return await self.events.get()
        except TimeoutError:
            return Ended(self.request.id, "deadline")

    async def until_end(self, end: Callable[[Stream], None]) -> AsyncGenerator[TokenEvent, None]:
        """The events until the last, or an error that is raised; then `end` is called."""
        over = False
        try:
            while not over:
                event = await self.next()
                if isinstance(event, RequestError):
                    raise event
                over = ends(event)
                yield event
        finally:
            end(self)

    def resumed(self, now: float) -> Request:
        """What is left of the request, under the submission's name."""
        left = None if self.deadline is None else max(self.deadline - now, 0.001)
        return msgspec.structs.replace(
            self.request,
            id=self.name,
            resume=list(self.given),
            resume_prompt_logprobs=self.prompt_logprobs,
            timeout=left,
        )

    def take(self, event: TokenEvent) -> list[TokenEvent]:
        """What the client gets now; keeps what a new engine has to be told.

        The texts of a beam search come as a whole, as a new engine would search again.
        """
        self.over = ends(event)
        if isinstance(event, BeamText):
            self.found.append(event)
            return [*self.found] if event.last else []
        if isinstance(event, PromptLogprobs):
            self.prompt_logprobs += len(event.logprobs)
        elif isinstance(event, Token):
            self.given.append(event.token)
            if any(self.before):  # an engine counts from its submission on
                right, wrong = map(sum, zip(self.before, event.predicted, strict=True))
                event = msgspec.structs.replace(event, predicted=(right, wrong))
            self.predicted = event.predicted
        return [event]


class Replay:
    """All requests in flight, and which of them the engine has."""

    def __init__(self) -> None:
        self.streams: dict[Stream, None] = {}  # in order of arrival
        self._held: dict[str, Stream] = {}  # by the engine, by name
        self._serials = count()
        self._frames = 0

    @property
    def busy(self) -> bool:
        """Whether the engine has something to do."""
        return bool(self._held)

    def find(self, name: str) -> Stream | None:
        """The stream that a message is for; None for what was still on its way from an earlier
        submission."""
        return self._held.get(name)

    def add(self, stream: Stream) -> None:
        self.streams[stream] = None

    def remove(self, stream: Stream) -> str:
        """Forgets a stream; gives the name the engine has it under, or ""."""
        self.streams.pop(stream, None)
        return self._take_back(stream)

    @property
    def suspicious(self) -> bool:
        """Whether there are requests that run alone."""
        return any(s.doubt >= SUSPECT and not s.over for s in self.streams)

    def _take_back(self, stream: Stream) -> str:
        name, stream.name = stream.name, ""
        self._held.pop(name, None)
        return name

    def turn(self) -> tuple[list[str], list[Stream]]:
        """What the engine is to give back, by name, and what it gets instead."""
        if any(s.doubt >= SUSPECT for s in self._held.values()):
            return [], []
        waiting = [s for s in self.streams if not s.name and not s.over]
        suspects = [s for s in waiting if s.doubt >= SUSPECT][:1]
        back = [self._take_back(s) for s in list(self._held.values())] if suspects else []
        for stream in suspects or waiting:
            stream.name = f"{stream.request.id}.{next(self._serials)}"
            stream.since, stream.start = self._frames, len(stream.given)
            stream.found, stream.before = [], stream.predicted
            self._held[stream.name] = stream
        return back, suspects or waiting

    def stepped(self) -> bool:
        """After a frame of events: whether a suspect has got past where it was, or to its end.

        Each frame is a step at least; at most MAX_AHEAD tokens are computed but not given. The
        engine does not have what has ended, however long its client reads.
        """
        self._frames += 1
        cleared = False
        for stream in list(self._held.values()):
            if stream.over:
                cleared |= stream.doubt >= SUSPECT
                self._take_back(stream)
            elif stream.doubt and (
                len(stream.given) - stream.start > MAX_AHEAD
                or self._frames - stream.since > stream.reached + MAX_AHEAD
            ):
                cleared |= stream.doubt >= SUSPECT
                stream.doubt = 0
        return cleared

    def fail_all(self, error: RequestError) -> None:
        """Ends every request with an error."""
        for stream in self.streams:
            stream.events.put_nowait(error)

    def died(self, doubt: int) -> Stream | None:
        """The engine is gone, which says so much against each request it had. Gives the one it has
        died of, which is forgotten.

        That one was alone, and the process at fault; where the process was killed, which others do
        too, it was alone twice and got no further.
        """
        culprit = None
        for stream in list(self._held.values()):
            if len(stream.given) > stream.start:
                stream.futile = 0
            if stream.doubt >= SUSPECT and doubt:
                stream.futile += len(stream.given) == stream.start
                if doubt >= SUSPECT or stream.futile >= FUTILE:
                    culprit = stream
            stream.reached = max(stream.reached, self._frames - stream.since)
            stream.doubt += doubt
            self._take_back(stream)
        if culprit is not None:
            self.remove(culprit)
        return culprit
