"""Several engines of one model as one: requests go where they cost least, and move when one ends.

What an engine holds is known exactly: it tells which blocks come to its prefix cache and go from
it. A stream that an engine loses goes on at another, which is told the tokens that were given, so
nobody can tell. Only streams that an engine may have died of stay with the one that takes its
place, where they run alone; no other engine is put at risk.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from octavo.backends.base import BLOCK
from octavo.balance.chain import chain
from octavo.balance.cost import Ask
from octavo.balance.replica import Replica, ReplicaTimes, State
from octavo.balance.router import Router
from octavo.client.base import EngineClient
from octavo.client.cached_prompts import CachedPrompts
from octavo.client.process import EngineProcessClient
from octavo.client.replay import SUSPECT, Stream
from octavo.client.routes import Routes
from octavo.engine.constraint import TokenTable
from octavo.engine.cost import ROW
from octavo.engine.events import TokenEvent
from octavo.engine.request import Request
from octavo.errors import InvalidValue, Overloaded, RequestError

MEANS = ("step_us", "slowdown_permille", "prompt_token_ns")  # stats that are no sums
REPLY, NEWEST = 64.0, 0.1  # tokens of a reply before any has ended, and the weight of the latest


@dataclass(eq=False)
class Home:
    """A replica: an engine with its name. streams: those it has, each with the tokens that were to
    be computed when it came, and those it had given by then. idle: there are none."""

    name: str
    client: EngineProcessClient
    draining: bool = False
    streams: dict[Stream, tuple[int, int]] = field(default_factory=dict)
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def state(self) -> State:
        if not self.client.ready:
            return "down"
        return "draining" if self.draining else "up"

    def figures(self, others: ReplicaTimes) -> Replica:
        """As it is now. others: times that stand for those that are not measured yet."""
        own = ReplicaTimes.of(self.client.stats)
        count, measured = len(self.streams) + 1, max(self.client.stats.get("running", 0), 1)
        step = (own.step or others.step) * (1 + ROW * count) / (1 + ROW * measured)
        waiting = [n for s, (n, given) in self.streams.items() if len(s.given) == given]
        return Replica(
            self.name, self.state, len(self.streams) - len(waiting), len(waiting), sum(waiting),
            self.client.places, own.prompt_token or others.prompt_token, step,
            own.image or others.image,
        )  # fmt: skip


def ask_of(request: Request, reply: float = 0.0) -> Ask:
    """What routing looks at of a request, whose reply may have so many tokens. Images stand in the
    prefix cache by their content."""
    keys = list(request.prompt)
    for image, start in zip(request.images, request.image_offsets, strict=True):
        keys[start : start + image.tokens] = [image.key] * image.tokens
    salt = request.salt + (f"\0{request.adapter}" if request.adapter else "")
    most = 0 if request.pool else request.params.max_tokens
    reply = reply if most is None else min(most, reply)
    images = tuple(image.key for image in request.images)
    return Ask(len(keys), chain(keys, BLOCK, salt), BLOCK, images, reply=reply)


def engines(client: EngineClient) -> Mapping[str, EngineClient]:
    """What computes behind a client, by name; one that is alone has none."""
    return client.engines if isinstance(client, Replicas) else {"": client}


class Replicas:
    """An `EngineClient` of several, which are called 0, 1, and so on. policy: how they are chosen,
    a name of `POLICIES`."""

    def __init__(self, clients: Sequence[EngineProcessClient], policy: str = "cost") -> None:
        self._homes = {str(i): Home(str(i), client) for i, client in enumerate(clients)}
        self._router = Router(policy)
        self._at: dict[Stream, Home] = {}
        self._reply = REPLY  # tokens that replies have had of late
        self.routes = Routes()
        for client in clients:
            client.overseer = self

    @property
    def engines(self) -> Mapping[str, EngineClient]:
        """The engines by their names."""
        return {name: home.client for name, home in self._homes.items()}

    @property
    def states(self) -> dict[str, State]:
        """What becomes of requests at each replica."""
        return {name: home.state for name, home in self._homes.items()}

    # -- life -----------------------------------------------------------------------------------

    def use(self, table: TokenTable) -> None:
        """Gives the tokens of the vocabulary."""
        for client in self._clients:
            client.use(table)

    async def start(self) -> None:
        """Starts all engines. Raises what made one fail."""
        starting = [asyncio.create_task(client.start()) for client in self._clients]
        try:
            await asyncio.gather(*starting)
        finally:
            for task in starting:
                task.cancel()

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients))

    @property
    def _clients(self) -> list[EngineProcessClient]:
        return [home.client for home in self._homes.values()]

    @property
    def ready(self) -> bool:
        """Whether any engine is."""
        return any(client.ready for client in self._clients)

    @property
    def pid(self) -> int | None:
        """The first engine's; `engines` has all."""
        return self._clients[0].pid

    @property
    def isa(self) -> str:
        return self._clients[0].isa

    @property
    def stats(self) -> dict[str, int]:
        """Sums over the engines; of times, means over those that have measured them."""
        total, measured = Counter[str](), Counter[str]()
        for client in self._clients:
            total.update(client.stats)
            measured.update(name for name in MEANS if client.stats.get(name))
        means = {name: total[name] // measured[name] for name in measured}
        return dict(total) | means

    @property
    def caches(self) -> Sequence[CachedPrompts]:
        return [cache for client in self._clients for cache in client.caches]

    # -- requests -------------------------------------------------------------------------------

    async def submit(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """Token events of a request until its end. Closing the iterator aborts it.

        Raises RequestError if it is refused, Overloaded if no engine can take it now.
        """
        stream = Stream.of(request, asyncio.get_running_loop().time())
        self._place(stream)
        async with contextlib.aclosing(stream.until_end(self._release)) as events:
            async for event in events:
                yield event

    def _place(self, stream: Stream) -> None:
        """Gives a new stream to the engine where it costs least, of those that have room."""
        if (name := stream.request.adapter) not in ("", *self.adapters):
            raise RequestError(f"no adapter {name[:64]!r}", "adapter", "model_not_found")
        ask, full = ask_of(stream.request, self._reply), set[str]()
        refusals: list[Overloaded] = []
        while (home := self._choose(stream, ask, full)) is not None:
            try:
                home.client.check(stream)
            except Overloaded as e:
                refusals.append(e)
                full.add(home.name)
            else:
                return self._assign(stream, ask, home)
        if not refusals:
            raise Overloaded("every replica is draining", code="loading")
        raise min(refusals, key=lambda e: e.retry_after or 0)

    def _choose(self, stream: Stream, ask: Ask, barred: Collection[str]) -> Home | None:
        """The replica for a stream; None: all are barred or draining. While no engine is ready, it
        waits for one."""
        request = stream.request
        lacks = {
            n for n, h in self._homes.items() if request.adapter not in ("", *h.client.adapters)
        }
        for home in self._homes.values():  # choices of a prompt, which is computed once
            shared = any(s.request.prompt is request.prompt and not s.given for s in home.streams)
            if shared and home.state == "up" and home.name not in {*barred, *lacks}:
                return home
        self._measure()
        risky = {n for n, h in self._homes.items() if h.client.suspicious}
        for left_out in ({*barred, *lacks, *risky}, {*barred, *lacks}):
            if (route := self._router.choose(ask, left_out)) is not None:
                self.routes.add(ask.tokens, route, self._router.explain(ask, left_out))
                return self._homes[route.replica]
        able = (h for h in self._homes.values() if not h.draining and h.name not in barred)
        return None if self.ready else next(able, None)

    def _measure(self) -> None:
        """Has the router know the replicas as they are; one that has not measured its times yet is
        taken to be as the others."""
        mean = ReplicaTimes.of(self.stats)
        for home in self._homes.values():
            self._router.fleet.put(home.figures(mean))

    def _assign(self, stream: Stream, ask: Ask, home: Home) -> None:
        """Gives a stream to an engine. Raises RequestError."""
        home.client.adopt(stream)
        cached = self._router.index.match(ask.blocks).blocks(home.name) * BLOCK
        self._router.images.sent(home.name, ask.images)
        home.streams[stream] = ask.tokens + len(stream.given) - cached, len(stream.given)
        home.idle.clear()
        self._at[stream] = home

    def _release(self, stream: Stream) -> None:
        home = self._at.pop(stream)
        if stream.over:
            self._reply += NEWEST * (len(stream.given) - self._reply)
        del home.streams[stream]
        if not home.streams:
            home.idle.set()
        home.client.release(stream)

    # -- what becomes of engines ----------------------------------------------------------------

    def changed(self, client: EngineClient) -> None:
        """An engine is ready, or has ended: what it lost goes on elsewhere."""
        for home in self._homes.values():
            if home.client is client and not client.ready:
                self._router.empty(home.name)
            if home.client.phase == "starting":  # it is known whom the one before died of
                self._move(home)

    def told(self, client: EngineClient, stored: list[int], removed: list[int]) -> None:
        """Blocks have come to an engine's prefix cache, and gone from it."""
        name = next(name for name, home in self._homes.items() if home.client is client)
        self._router.index.stored(name, stored)
        self._router.index.removed(name, removed)

    def _move(self, home: Home) -> None:
        """Gives the streams of a replica to others that are ready, but not those that its engine
        may have died of."""
        for stream in list(home.streams):
            if stream.doubt >= SUSPECT or stream.over:
                continue
            ask = ask_of(stream.request, self._reply)
            other = self._choose(stream, ask, {home.name})
            if other is not None and other.client.ready:
                self._release(stream)
                self._assign(stream, ask, other)

    async def drain(self, name: str, seconds: float) -> None:
        """Keeps new requests from a replica, until `resume`. Returns when those that it had have
        ended; after so many seconds the others go on elsewhere. Raises InvalidValue."""
        home = self._home(name)
        if not any(h.state == "up" for h in self._homes.values() if h is not home):
            raise InvalidValue(f"no replica but {name} takes requests", "replica")
        home.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await home.idle.wait()
        self._move(home)

    def resume(self, name: str) -> None:
        """Lets a replica have requests again. Raises InvalidValue."""
        self._home(name).draining = False

    async def restart(self, name: str, seconds: float) -> None:
        """Drains a replica and gives it a new engine, which is ready then. Raises InvalidValue, and
        Overloaded if there is none."""
        home = self._home(name)
        before = home.draining
        try:
            await self.drain(name, seconds)
            await home.client.restart()
        except BaseException:  # also if whoever wanted it does not wait
            home.draining = before
            raise
        home.draining = False

    def _home(self, name: str) -> Home:
        if name not in self._homes:
            known = ", ".join(self._homes)
            raise InvalidValue(f"no replica {name[:64]!r}; there are {known}", "replica")
        return self._homes[name]

    # -- adapters -------------------------------------------------------------------------------

    @property
    def adapters(self) -> list[str]:
        """Names of those that requests may ask for: every engine that is ready has them."""
        ready = [c for c in self._clients if c.ready] or self._clients
        return [name for name in ready[0].adapters if all(name in c.adapters for c in ready)]

    @property
    def adapter_paths(self) -> dict[str, str]:
        """The folders that the adapters were loaded from, by name."""
        paths = dict[str, str]()
        for client in self._clients:
            paths |= client.adapter_paths
        return {name: paths[name] for name in self.adapters}

    async def load_adapter(self, name: str, path: str) -> None:
        """Loads a LoRA adapter into every engine, or into none. Raises RequestError."""
        done: list[EngineProcessClient] = []
        try:
            for client in self._clients:
                await client.load_adapter(name, path)
                done.append(client)
        except BaseException:  # also if whoever wanted it does not wait
            for client in done:
                with contextlib.suppress(RequestError):  # one may have lost it meanwhile
                    await client.unload_adapter(name)
            raise

    async def unload_adapter(self, name: str) -> None:
        """Keeps an adapter from new requests. Raises RequestError if no engine has it."""
        having = [client for client in self._clients if name in client.adapters]
        for client in having or self._clients[:1]:
            await client.unload_adapter(name)
