"""Ways to route requests between replicas, compared in simulation, and what a decision takes.

    python benchmarks/routing.py [--replicas 8 64] [--load 0.73] [--gateways 1]
    python benchmarks/routing.py --decisions

The workload: prompts of groups that share a long prefix, some groups more popular than others,
arriving at random at a share of what the replicas can do (measured first: all requests at once,
routed by cost). The engines are simulated (`octavo.simulate`), with the clock too; the router is the
one that serves.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, count

import msgspec

from octavo.balance.chain import chain
from octavo.balance.cost import Ask
from octavo.balance.prefix_index import ReplicaPrefixes
from octavo.balance.replica import Replica
from octavo.balance.router import Router, RoutingDecision
from octavo.gateway.body import BLOCK_TOKENS as GATEWAY_BLOCK
from octavo.gateway.body import Relayed, read_outline
from octavo.gateway.prompt_names import name_prompt
from octavo.gateway.upstream import DEFAULT, ModelFigures, Place
from octavo.gateway.upstream_cache import MOST_SENT, HeldBlocks, UpstreamCache
from octavo.gateway.upstreams import Upstreams
from octavo.simulate.engine import (
    BLOCK_TOKENS,
    SimulatedEngine,
    SimulatedRequest,
    SimulatedStep,
    Speed,
)

SPEED = Speed(prefill=2000, step=0.02, slots=16, chunk=512, cache=65_536)
PREFIX, QUESTION, REPLY = 2048, 256, 64  # tokens
GROUPS = 23  # for each replica: 72 % of its cache
REQUESTS = 400  # for each replica
MODEL = "m"
SKEW = 0.7  # popularity of group n: 1 / n ** SKEW
# Ways, and what is known of caches: what engines tell of their blocks, or what gateways know of
# Octavo's servers (how much of each prompt they hold), of others by what was sent there, and how
# large they are.
WAYS = {
    "cost": "blocks", "cost, prompts": "prompts", "cost, sent": "size", "cost, sent, no size": "",
    "prefix-hash": "", "least-load": "", "round-robin": "", "random": "",
}  # fmt: skip


@dataclass
class Server:
    """A replica in the simulation. waits: tokens to compute for jobs without a first token."""

    name: str
    engine: SimulatedEngine = field(default_factory=lambda: SimulatedEngine(SPEED))
    waits: dict[str, int] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    busy: bool = False

    @property
    def figures(self) -> Replica:
        return Replica(
            self.name, "up", len(self.running), len(self.waits), sum(self.waits.values()),
            SPEED.slots, 1 / SPEED.prefill, SPEED.step, reply=REPLY,
        )  # fmt: skip


@dataclass(frozen=True)
class Result:
    """Seconds until first tokens, output tokens a second, and the share of prompts' tokens that were
    found in caches."""

    ttft: list[float]
    throughput: float
    cached: float

    def line(self, name: str) -> str:
        cuts = statistics.quantiles(self.ttft, n=100)
        p50, p90, p99 = (f"{1e3 * cuts[i]:10,.0f}" for i in (49, 89, 98))
        return f"{name:20} {p50} {p90} {p99} {self.throughput:12,.0f} {self.cached:9.1%}"


def prompts(replicas: int, seed: int) -> list[tuple[int, ...]]:
    """The blocks of every request's prompt."""
    draw, groups = random.Random(seed), range(GROUPS * replicas)
    shares = list(accumulate((g + 1) ** -SKEW for g in groups))
    prefixes = [chain([g] * PREFIX, BLOCK_TOKENS) for g in groups]
    made = []
    for i in range(REQUESTS * replicas):
        own = chain([i] * QUESTION, BLOCK_TOKENS, "question")
        made.append((*prefixes[draw.choices(groups, cum_weights=shares)[0]], *own))
    return made


def text_blocks(blocks: Sequence[int]) -> tuple[int, ...]:
    """Blocks of a gateway, which are larger."""
    ratio = GATEWAY_BLOCK // BLOCK_TOKENS
    return tuple(blocks[ratio - 1 :: ratio])


class Door:
    """Where requests come in, with its own knowledge of what replicas hold. sent: what it counts as
    held of the prompts of jobs that have not ended."""

    def __init__(self, way: str, replicas: Iterable[str]) -> None:
        self._known = WAYS[way]
        self._index = ReplicaPrefixes() if self._known == "blocks" else ReplicaPrefixes(MOST_SENT)
        self._caches = {name: UpstreamCache(name) for name in replicas}
        self._sent: dict[str, HeldBlocks | None] = {}
        self.router = Router(way.partition(", ")[0], self._index)
        for cache in self._caches.values():
            cache.tells = self._known == "prompts"
            cache.resize(self._index, SPEED.cache if self._known == "size" else 0)

    def route(self, job: SimulatedRequest) -> RoutingDecision:
        """The replica for a job."""
        ask = Ask(job.prompt, tuple(job.blocks), BLOCK_TOKENS, reply=REPLY)
        if self._known != "blocks":  # a gateway's are larger
            blocks = text_blocks(job.blocks)
            ask = msgspec.structs.replace(ask, blocks=blocks, block=GATEWAY_BLOCK)
        route = self.router.choose(ask)
        assert route is not None
        if self._known != "blocks":
            self._sent[job.id] = self._caches[route.replica].begin(self._index, ask)
        return route

    def told(self, replica: str, done: SimulatedStep) -> None:
        """A replica has computed a step."""
        if self._known == "blocks":
            self._index.stored(replica, done.stored)
            self._index.removed(replica, done.removed)
        elif self._known == "prompts":
            self._caches[replica].told(done.prompts, {MODEL: self._index})
        for job in done.finished:
            self._caches[replica].end(self._sent.pop(job, None))


class Simulation:
    """Requests at given times, until the last has ended. doors: where they come in, at random."""

    def __init__(self, way: str, replicas: int, doors: int = 1) -> None:
        self._servers = {str(i): Server(str(i)) for i in range(replicas)}
        self._doors = [Door(way, self._servers) for _ in range(doors)]
        for server in self._servers.values():
            self._put(server)
        self._came: dict[str, float] = {}
        self._ttft: list[float] = []
        self._found = self._given = 0
        self._heap: list[tuple[float, int, object]] = []
        self._serial = count()

    def run(self, made: Sequence[tuple[int, ...]], rate: float, seed: int = 1) -> Result:
        """rate: requests a second, at random; infinity: all at once."""
        draw, now = random.Random(seed), 0.0
        for i, blocks in enumerate(made):
            now += draw.expovariate(rate) if rate < float("inf") else 0.0
            name = name_prompt(MODEL, text_blocks(blocks))
            self._at(now, SimulatedRequest(str(i), PREFIX + QUESTION, REPLY, blocks, name))
        end = 0.0
        while self._heap:
            end, _, what = heapq.heappop(self._heap)
            if isinstance(what, SimulatedRequest):
                self._route(what, draw.choice(self._doors), end)
            else:
                what()  # type: ignore[operator]
        asked = len(made) * (PREFIX + QUESTION)
        return Result(self._ttft, self._given / end, self._found / asked)

    def _put(self, server: Server) -> None:
        for door in self._doors:
            door.router.fleet.put(server.figures)

    def _at(self, when: float, what: object) -> None:
        heapq.heappush(self._heap, (when, next(self._serial), what))

    def _route(self, job: SimulatedRequest, door: Door, now: float) -> None:
        route = door.route(job)
        server = self._servers[route.replica]
        self._came[job.id] = now
        server.waits[job.id] = job.prompt - route.cost.cached
        server.engine.submit(job)
        self._put(server)
        if not server.busy:
            self._step(server, now)

    def _step(self, server: Server, now: float) -> None:
        done = server.engine.step()
        server.busy = bool(done.tokens or done.seconds)
        if not server.busy:
            return
        end = now + done.seconds
        self._found += sum(done.cached.values())

        def ended() -> None:
            for job in done.tokens:
                self._given += 1
                if server.waits.pop(job, None) is not None:
                    server.running.add(job)
                    self._ttft.append(end - self._came[job])
            server.running.difference_update(done.finished)
            for door in self._doors:
                door.told(server.name, done)
            self._put(server)
            self._step(server, end)

        self._at(end, ended)


def compare(replicas: int, load: float, doors: int) -> None:
    made = prompts(replicas, seed=7)
    most = Simulation("cost", replicas).run(made, float("inf")).throughput / REPLY
    print(f"\n{replicas} replicas, {len(made):,} requests, {load:.0%} of {most:.1f} requests/s")
    print(f"{'':20} {'TTFT p50':>10} {'p90 ms':>10} {'p99':>10} {'tokens/s':>12} {'cached':>9}")
    for way in WAYS:
        print(Simulation(way, replicas, doors).run(made, load * most).line(way), flush=True)


def spread(work: Sequence[Callable[[], object]]) -> str:
    """Microseconds of processor time of each, p50 and p99."""
    took = []
    for one in work:
        began = time.process_time()
        one()
        took.append(1e6 * (time.process_time() - began))
    p50, p99 = (statistics.quantiles(took, n=100)[i] for i in (49, 98))
    return f"{p50:8.0f} {p99:8.0f}"


def engines_of(replicas: int, draw: random.Random) -> Router:
    """Engines that tell what they hold: all have half of a prompt of 4,096 tokens, one has all."""
    router, blocks = Router(), chain(range(4096), BLOCK_TOKENS)
    for i in range(replicas):
        router.index.stored(str(i), blocks[:128])
        speed = draw.uniform(4e-4, 6e-4), draw.uniform(0.01, 0.03)
        router.fleet.put(Replica(str(i), "up", i % 13, 0, draw.randrange(4000), 32, *speed))
    router.index.stored("1", blocks)
    return router


def body(number: int) -> Ask:
    """What is read of a body of 220 KB, half of which is the same in each."""
    text = "word " * 22_000 + f"{number:04} " * 22_000
    data = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    return Relayed("/v1/chat/completions", "", data, read_outline(data)).ask


def upstreams_of(replicas: int, draw: random.Random) -> Upstreams:
    """Upstreams of a gateway, a quarter of them idle, half of them with the beginning of bodies."""
    upstreams, ask = Upstreams(), body(0)
    for i in range(replicas):
        one = upstreams.add(Place(f"http://replica{i}:8000"))
        one.prompt_token, one.step = draw.uniform(4e-4, 6e-4), draw.uniform(0.01, 0.03)
        one.waiting, one.running = i % 4, i % 13
        one.waiting_tokens = one.waiting * draw.randrange(1, 1000)
        upstreams.up(one, {"m": ModelFigures()}, True)
        if i % 2:
            lease = upstreams.choose(DEFAULT, "m", ask).lease
            assert lease is not None and lease.upstream is one
            lease.end()
        upstreams.drain(one)  # for now, so that each is the only one in its turn
    for one in upstreams:
        upstreams.up(one, {"m": ModelFigures()}, True)
    return upstreams


def decisions() -> None:
    """What a decision takes by the number of replicas, in processor time."""
    asks = [body(i) for i in range(1, 301)]
    known = Ask(4096, chain(range(4096), BLOCK_TOKENS), BLOCK_TOKENS, reply=REPLY)
    print("µs          engines, 4,096 tokens    gateway, 220 KB")
    print(f"{'replicas':>8} {'p50':>11} {'p99':>8} {'p50':>11} {'p99':>8}")
    for replicas in (2, 8, 64, 512, 4000):
        draw = random.Random(3)
        router, upstreams = engines_of(replicas, draw), upstreams_of(replicas, draw)

        def gateway(ask: Ask, upstreams: Upstreams = upstreams) -> None:
            lease = upstreams.choose(DEFAULT, "m", ask).lease
            assert lease is not None
            lease.end(True)

        one = spread([partial(router.choose, known)] * len(asks))
        two = spread([partial(gateway, ask) for ask in asks])
        print(f"{replicas:8,}    {one}    {two}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--load", type=float, default=0.73)
    parser.add_argument("--gateways", type=int, default=1, help="beside one another")
    parser.add_argument("--decisions", action="store_true", help="time decisions instead")
    options = parser.parse_args()
    if options.decisions:
        return decisions()
    for replicas in options.replicas:
        compare(replicas, options.load, options.gateways)


if __name__ == "__main__":
    main()
