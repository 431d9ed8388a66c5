"""Servers that the gateway owns: it starts `octavo serve` on loopback, watches it and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from octavo.engine.host import available_memory
from octavo.engine.plan import MIB, size
from octavo.errors import DoesNotFit, UsageError
from octavo.gateway.config import LocalModel
from octavo.gateway.discovery import Take
from octavo.gateway.upstream import Place
from octavo.gateway.upstreams import Upstreams
from octavo.process import python_module

LOG = logging.getLogger("octavo.gateway")
COMMAND = "octavo.cli.main"
READY = re.compile(r"  API +(http://\S+)/v1$")  # of the lines that a server says once it answers
FRONT = 128 * MIB  # of a server's front and its workers, beside the engine's plan; measured 96
PAUSE, LONGEST = 0.5, 30.0  # seconds before one that has died is started again; doubles
STEADY = 60.0  # seconds after which a death is taken for the first
GRACE = 40.0  # seconds for one to end after SIGTERM; it gives requests 30
DRAINED = 0.05  # seconds between looks whether it is asked by anybody
PASSED = ("OCTAVO_CACHE", "OCTAVO_ISA")  # variables that are not about the gateway


class _Sizes(msgspec.Struct):
    """What `octavo plan` says of a model, in bytes."""

    total: int
    kv_cache: int


class LocalServers:
    """Knows every server of this gateway, until its process has ended. closing: the gateway ends,
    so that nobody's requests are waited for."""

    def __init__(self, upstreams: Upstreams) -> None:
        self._upstreams, self.closing = upstreams, False
        self.key = secrets.token_urlsafe(24)  # without which nobody else on this machine asks them
        self.pools: dict[str, LocalPool] = {}  # those that are kept running
        self._ending: dict[asyncio.Task[None], LocalServer] = {}

    @property
    def environ(self) -> dict[str, str]:
        """Of servers: their options are those of their pool alone. The gateway is their admin, whom
        they tell what they have cached, and nobody knows the other key."""
        kept = {n: v for n, v in os.environ.items() if n in PASSED or not n.startswith("OCTAVO_")}
        keys = {"OCTAVO_ADMIN_KEY": self.key, "OCTAVO_API_KEY": secrets.token_urlsafe(24)}
        return kept | keys

    def check(self, new: Sequence[LocalPool]) -> None:
        """Raises DoesNotFit if pools do not fit beside those that run, in the memory that these
        have taken and that is free."""
        ending = list(self._ending.values())
        servers = [*ending, *(s for pool in self.pools.values() for s in pool.servers)]
        room = available_memory() + sum(map(resident, (s.pid for s in servers)))
        room -= sum(p.total for p in self.pools.values()) + sum(s.nbytes for s in ending)
        wanted = sum(pool.total for pool in new)
        if not new or wanted <= room:  # those that run have what they have, however little is left
            return
        last = new[-1]
        each = (room - wanted + last.total) // last.spec.replicas - FRONT
        fits = each >= last.least
        hint = f"memory: {each // MIB}MiB" if fits else "fewer replicas or a smaller model"
        sums = " + ".join(f"{p.pool} {p.spec.replicas} x {size(p.each)}" for p in new)
        running = "".join(f", {p.pool} {size(p.total)}" for p in self.pools.values())
        raise DoesNotFit(
            f"local pools do not fit: {sums} = {size(wanted)} > {size(max(0, room))} that are left "
            f"on this machine (running{running or ': none'}); pools.{last.pool}.local takes {hint}"
        )

    def end(self, server: LocalServer, place: Place | None) -> None:
        """Ends a server once its requests have ended; nobody sends it new ones."""
        task = asyncio.create_task(self._end(server, place))
        self._ending[task] = server
        task.add_done_callback(self._ending.pop)

    async def _end(self, server: LocalServer, place: Place | None) -> None:
        while place and not self.closing and self._upstreams.get(place.id) is not None:
            await asyncio.sleep(DRAINED)
        await server.end()

    async def close(self) -> None:
        """Waits until all have ended."""
        await asyncio.gather(*self._ending, return_exceptions=True)


class LocalServer:
    """A process of `octavo serve`. nbytes: that it may take."""

    def __init__(self, process: asyncio.subprocess.Process, name: str, nbytes: int) -> None:
        self._process, self._name, self.nbytes = process, name, nbytes
        self._last: deque[str] = deque(maxlen=8)
        self.ready = asyncio.Event()
        self.url = ""
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls, name: str, spec: LocalModel, each: int, environ: dict[str, str]
    ) -> LocalServer:
        """Raises OSError."""
        command = python_module(
            COMMAND, "serve", f"--parent={os.getpid()}", "--host=127.0.0.1", "--port=0", "--no-ui",
            "--log-level=warning", "--log-format=json", *sizing(spec, f"{each - FRONT}"),
            *([f"--name={spec.name}"] if spec.name else []), "--", spec.model,
        )  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT, env=environ, limit=1 << 20,
            start_new_session=True,  # Ctrl-C is the gateway's business
        )  # fmt: skip
        return cls(process, name, each)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last(self) -> str:
        """Why it has ended, in its own words."""
        errors = [line for line in self._last if line.startswith("error: ")]
        words = (errors or list(self._last) or ["it said nothing"])[-1]
        return f"{words.strip()} (status {self._process.returncode})"

    async def _read(self) -> None:
        """What it says is passed on to the log, so far as it is not about its start."""
        out = self._process.stdout
        assert out is not None
        while True:
            try:
                line = (await out.readline()).decode(errors="replace")
            except ValueError:  # longer than any that it says
                continue
            if not line:
                return
            self._last.append(line)
            if line.startswith("{"):
                LOG.info("%s: %s", self._name, line.rstrip())
            elif found := READY.match(line.rstrip()):
                self.url = found[1]
                self.ready.set()

    async def wait(self) -> None:
        """Until it has ended."""
        await self._process.wait()
        await self._reading

    async def end(self) -> None:
        """Ends it: what it is asked is answered, for as long as it gives that."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
            try:
                async with asyncio.timeout(GRACE):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
        await self.wait()


class LocalPool:
    """A source of upstreams: servers of one model, which are started again when they die.

    total: bytes of all; each: of one; least: of one's engine, with next to no KV cache. reason: why
    one died before it had answered.
    """

    def __init__(self, owner: LocalServers, pool: str, spec: LocalModel) -> None:
        self._owner, self.pool, self.spec = owner, pool, spec
        self.each = self.least = 0
        self.reason = ""
        self.servers: set[LocalServer] = set()
        self._places: dict[int, Place] = {}

    @property
    def total(self) -> int:
        return self.spec.replicas * self.each

    async def look(self) -> list[Place]:
        """Plans the memory; nobody runs yet. Raises UsageError."""
        process = await asyncio.create_subprocess_exec(
            *python_module(COMMAND, "plan", "--json", *sizing(self.spec, self.spec.memory), "--",
                           self.spec.model),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, env=self._owner.environ,
        )  # fmt: skip
        out, error = await process.communicate()
        if process.returncode:
            why, hints = _refusal(error.decode(errors="replace"))
            raise UsageError(f"pools.{self.pool}.local: {why or process.returncode}", *hints)
        sizes = msgspec.json.decode(out, type=_Sizes)
        self.each, self.least = sizes.total + FRONT, sizes.total - sizes.kv_cache + 16 * MIB
        return []

    async def follow(self, take: Take) -> None:
        self._owner.pools[self.pool] = self
        try:
            async with asyncio.TaskGroup() as group:
                for i in range(self.spec.replicas):
                    group.create_task(self._keep(i, take))
        finally:
            if self._owner.pools.get(self.pool) is self:
                del self._owner.pools[self.pool]

    async def _keep(self, number: int, take: Take) -> None:
        """Keeps one server running."""
        name, pause = f"{self.pool}/{number}", PAUSE
        loop, owner = asyncio.get_running_loop(), self._owner
        while True:
            began = loop.time()
            try:
                server = await LocalServer.start(name, self.spec, self.each, owner.environ)
            except OSError as e:
                self.reason = f"{name} cannot be started: {e.strerror}"
            else:
                await self._watch(server, number, take)
            if loop.time() - began > STEADY:
                pause = PAUSE
            LOG.warning("%s; it is started again in %g s", self.reason, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST)

    async def _watch(self, server: LocalServer, number: int, take: Take) -> None:
        """Until a server has died. Its place stays: requests wait for the next."""
        name = f"{self.pool}/{number}"
        LOG.info("%s starts %s (pid %d)", name, self.spec.model, server.pid)
        self.servers.add(server)
        dead = asyncio.create_task(server.wait())
        ready = asyncio.create_task(server.ready.wait())
        mine = None
        try:
            await asyncio.wait({dead, ready}, return_when=asyncio.FIRST_COMPLETED)
            if server.ready.is_set():
                mine = self._places[number] = Place(server.url, self.pool, self._owner.key)
                self.reason = ""
                take(list(self._places.values()))
                await asyncio.shield(dead)
            self.reason = f"{name} has ended: {server.last}"
        finally:
            ready.cancel()
            self.servers.discard(server)
            if not dead.done():
                self._owner.end(server, mine)


def sizing(spec: LocalModel, memory: str | None) -> list[str]:
    """Options of `octavo plan` and `octavo serve`."""
    given = {
        "memory": memory, "context": spec.context, "threads": spec.threads,
        "kv-dtype": spec.kv_dtype, "activations": spec.activations,
    }  # fmt: skip
    return ["--offline", *(f"--{n}={value}" for n, value in given.items() if value is not None)]


def _refusal(words: str) -> tuple[str, list[str]]:
    """Why `octavo plan` plans nothing, and what it would try, as fields: its command is no concern
    of who has written a configuration."""
    lines = words.splitlines()
    why = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "")
    hints = []
    for hint in (line.removeprefix("  try: ") for line in lines if line.startswith("  try: ")):
        _, planned, rest = hint.partition(" -- ")
        fields = [f"{o.replace('-', '_')}: {v}" for o, v in re.findall(r" --(\S+) (\S+)", rest)]
        hints.append(", ".join(fields) or f"model: {rest}" if planned else hint)
    return why, hints


def resident(pid: int) -> int:
    """Bytes of a process and its children, without pages of files."""
    folder, total = Path("/proc", str(pid)), 0
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "status").read_text().splitlines():
            if line.startswith(("RssAnon:", "RssShmem:")):
                total += int(line.split()[1]) * 1024
        for children in folder.glob("task/*/children"):
            total += sum(resident(int(child)) for child in children.read_text().split())
    return total
