"""Answers that would be given again in the same words are kept, within so many bytes."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from hashlib import blake2b

import msgspec
from msgspec import Raw
from starlette.responses import Response

from octavo.gateway.body import RESPONSES, Relayed
from octavo.gateway.job import RelayJob
from octavo.server.http import STREAM_HEADERS
from octavo.server.parsing import NOT_JSON

NOT_ASKED = ("x-request-id", "traceparent", "x-slo-ttft-ms", "via")  # change nothing in an answer
HEADER = "x-cache"
WHOLE = ("content-type", "x-replica")  # headers that are kept
SECONDS = 3600.0  # that an answer is kept: a server may have got other weights under the same name
FOLLOWED = 5.0  # that another's request is waited for, whose client may be slow to read
NO_SEED = (1 << 32) - 1  # of llama.cpp: draw one
OVERHEAD = 512  # bytes, about, of an answer without its body
END = b"data: [DONE]\n\n"
STREAMED = ("/v1/chat/completions", "/v1/completions")  # whose streams say that they are complete


class _Sampling(msgspec.Struct):
    temperature: Raw = Raw()
    seed: Raw = Raw()


def deterministic(body: bytes) -> bool:
    """Whether a request wants the likeliest tokens, or names a seed. Some servers take -1, or all
    of its 32 bits, for none."""
    try:
        said = msgspec.json.decode(body, type=_Sampling)
        zero = bytes(said.temperature) not in (b"", b"null") and float(bytes(said.temperature)) == 0
        return zero or 0 <= msgspec.json.decode(bytes(said.seed) or b"-1", type=int) != NO_SEED
    except (*NOT_JSON, ValueError):
        return False


def key_of(job: RelayJob, generation: int = 0) -> bytes | None:
    """Equal for requests with equal answers; None for what is not kept: what may be answered in
    other words or be cut, and requests that a release or an experiment learns from. generation: of
    the upstreams that are in its pools."""
    asked = job.asked
    if job.dealt.seen is not None or not deterministic(asked.body) or not _complete(asked):
        return None
    if job.limit is not None:
        return None
    who = sorted((k, v) for k, v in job.headers.items() if k not in NOT_ASKED)
    dealt = job.dealt
    where = (generation, dealt.version, dealt.pools)
    about = (where, asked.salt, who, asked.target, asked.outline.model)
    return blake2b(msgspec.msgpack.encode((about, asked.body)), digest_size=32).digest()


async def followed(coming: asyncio.Event, due: float | None) -> bool:
    """Whether somebody else's request has ended, in time. due: after that nobody wants to know."""
    left = math.inf if due is None else due - time.monotonic()
    with suppress(TimeoutError):
        async with asyncio.timeout(min(FOLLOWED, left)):
            return await coming.wait()
    return False


def _complete(asked: Relayed) -> bool:
    """Whether it can be told that an answer is, and nobody else has it."""
    return asked.path in STREAMED or not (asked.stream or asked.path == RESPONSES)


@dataclass(frozen=True)
class CachedAnswer:
    body: bytes
    headers: Mapping[str, str]
    until: float

    @property
    def size(self) -> int:
        return len(self.body) + OVERHEAD

    def response(self) -> Response:
        return Response(self.body, 200, {**self.headers, HEADER: "hit"})


class ResponseCache:
    """limit: bytes of all answers; 0: none is kept. Those that were not used the longest go.
    generation: a part of keys, so that what is on its way when it changes is not kept for others.
    """

    def __init__(self, limit: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._kept: OrderedDict[bytes, CachedAnswer] = OrderedDict()
        self._coming: dict[bytes, asyncio.Event] = {}
        self.size = self.hits = self.misses = self.generation = 0

    def forget(self) -> None:
        """Forgets all answers, also those that are on their way: others answer from now on."""
        self.generation += 1
        self._kept.clear()
        self.size = 0

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = limit
        self._evict()

    def coming(self, key: bytes) -> asyncio.Event | None:
        """What is set when somebody else's request of this kind has ended."""
        return None if key in self._kept else self._coming.get(key)

    def take(self, key: bytes) -> CachedAnswer | None:
        """The answer that is kept."""
        found = self._kept.get(key)
        if found is not None and found.until < self._clock():
            self._drop(key)
            found = None
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        self._kept.move_to_end(key)
        return found

    def begin(self, key: bytes) -> Callable[[], None]:
        """An answer is being made, others wait for it; what is returned says that it has ended."""
        event = self._coming[key] = asyncio.Event()

        def end() -> None:
            if self._coming.get(key) is event:
                del self._coming[key]
            event.set()

        return end

    def put(self, key: bytes, body: bytes, headers: Mapping[str, str]) -> None:
        """Keeps an answer, unless it alone is more than a quarter of what may be kept."""
        one = CachedAnswer(body, headers, self._clock() + SECONDS)
        if one.size <= self._limit // 4:
            self._drop(key)
            self._kept[key] = one
            self.size += one.size
            self._evict()

    def keep(self, key: bytes, response: Response) -> None:
        """Keeps an answer that has come as a whole, if it is good."""
        if response.status_code == 200:
            found = {k: v for k in WHOLE if (v := response.headers.get(k)) is not None}
            self.put(key, bytes(response.body), found)

    async def stream(
        self, key: bytes, frames: AsyncGenerator[bytes, None], kind: str, job: RelayJob
    ) -> AsyncGenerator[bytes, None]:
        """The frames of a stream, which is kept if it has come to a good end."""
        assert job.lease is not None
        replica = job.lease.upstream.id  # which others may follow
        had: list[bytes] = []
        size = 0
        async with aclosing(frames) as passed:
            async for frame in passed:
                size += len(frame)
                if size <= self._limit // 4:
                    had.append(frame)
                yield frame
        body = b"".join(had)
        if len(body) == size and body.endswith(END) and not job.erred:
            headers = {"content-type": kind, "x-replica": replica, **STREAM_HEADERS}
            self.put(key, body, headers)

    def _drop(self, key: bytes) -> None:
        if (old := self._kept.pop(key, None)) is not None:
            self.size -= old.size

    def _evict(self) -> None:
        while self.size > self._limit:
            self._drop(next(iter(self._kept)))
