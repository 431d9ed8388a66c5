"""Spikes of memory: which process grew within seconds, by how much, and what took it."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from octavo.server.engine_metrics import engines_of
from octavo.server.exchange import Exchange, Running, exchange
from octavo.server.registry import Entry

EVERY = 1.0  # seconds between looks
LOOKS = 10  # in which a process has to grow
LEAST, SHARE = 128 << 20, 0.1  # by so many bytes, and by this part of what it had
EXPLAINS = 0.25  # of a spike, from which on what grew by so many bytes is its cause
KEPT = 32
NAMED = 8  # requests
PAGE = os.sysconf("SC_PAGE_SIZE")
MEMORY_CAUSES = {
    "kv_cache": "KV blocks were used for the first time, as they were planned",
    "bodies": "bodies of requests were read",
    "images": "images were encoded",
    "adapters": "an adapter was loaded",
    "grammars": "a grammar was compiled",
    "preparation": "weights and KV blocks were written ahead of their use",
    "unknown": "nothing of that happened",
}


class MemorySpike(msgspec.Struct, frozen=True, kw_only=True):
    """A process that grew by so many bytes. model: whose engine (`m/0` of several), "" for the
    server. ended: since 1970. seconds: in which it grew. requests: ids of some that ran."""

    model: str
    ended: float
    seconds: float
    bytes: int
    cause: str
    requests: list[str]


@dataclass(frozen=True)
class Look:
    """A process at a time. taken: bytes of what may have grown; done: how often what happened that
    may take memory."""

    at: float
    bytes: int
    taken: Mapping[str, int]
    done: Mapping[str, int]


def anonymous(pid: int) -> int:
    """Bytes of memory of no file that a process has. Raises OSError once it has ended."""
    resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * PAGE


def cause_of(before: Look, after: Look) -> str:
    """What a process grew by: most of all that explains it, else what happened meanwhile."""
    grown = {name: size - before.taken.get(name, 0) for name, size in after.taken.items()}
    most = max(grown, key=lambda name: grown[name])
    if grown[most] >= EXPLAINS * (after.bytes - before.bytes):
        return most
    happened = (name for name, count in after.done.items() if count > before.done.get(name, 0))
    return next(happened, "unknown")


class MemorySpikes:
    """Looks at the server, process `pid`, and at its engines. kept: gets each spike; spiked: is
    told of its model and cause."""

    def __init__(
        self, models: Iterable[Entry], running: Running, kept: deque[MemorySpike],
        spiked: Callable[[str, str], None], pid: int | None = None,
    ) -> None:  # fmt: skip
        self._models, self._running, self._kept, self._spiked = models, running, kept, spiked
        self._pid = pid or os.getpid()
        self._read = 0  # bytes of bodies of requests that have ended
        self._looks: dict[int, deque[Look]] = {}

    def ended(self, one: Exchange) -> None:
        """A request has ended."""
        self._read += one.received

    async def watch(self) -> None:
        """Looks until it is cancelled."""
        while True:
            await asyncio.sleep(EVERY)
            self.look()

    def look(self) -> None:
        """Compares each process with what it had in the last looks."""
        seen: dict[int, deque[Look]] = {}
        for model, pid, taken, done in self._processes():
            try:
                now = Look(time.monotonic(), anonymous(pid), taken, done)
            except OSError:  # it has ended meanwhile
                continue
            looks = seen[pid] = self._looks.get(pid) or deque(maxlen=LOOKS)
            before = min(reversed(looks), key=lambda look: look.bytes, default=now)
            if now.bytes - before.bytes > max(LEAST, SHARE * before.bytes):
                self._found(model, before, now)
                looks.clear()
            looks.append(now)
        self._looks = seen

    def _processes(self) -> Iterator[tuple[str, int, Mapping[str, int], Mapping[str, int]]]:
        """The server, and the engines that are ready, with what may take memory in them."""
        scopes = [scope for each in self._running.values() for scope in each]
        read = self._read + sum(exchange(scope).received for scope in scopes)
        yield "", self._pid, {"bodies": read}, {}
        for model, replica, client in engines_of(self._models):
            if client.ready and client.pid is not None:
                stats, name = client.stats, f"{model}/{replica}" if replica else model
                done = {
                    "images": stats.get("images_encoded", 0), "adapters": len(client.adapters),
                    "grammars": stats.get("grammars_compiled", 0),
                    "preparation": stats.get("prepared", 0),
                }  # fmt: skip
                yield name, client.pid, {"kv_cache": stats.get("kv_bytes", 0)}, done

    def _found(self, model: str, before: Look, now: Look) -> None:
        cause = cause_of(before, now)
        spike = MemorySpike(
            model=model, ended=round(time.time(), 3), seconds=round(now.at - before.at, 3),
            bytes=now.bytes - before.bytes, cause=cause, requests=[*self._running][:NAMED],
        )  # fmt: skip
        self._kept.append(spike)
        self._spiked(model.partition("/")[0], cause)
