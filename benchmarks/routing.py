"""Ways to route requests between replicas, compared in simulation, and what a decision takes.

    python benchmarks/routing.py [--replicas 8 64] [--load 0.73]
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, count

from octavo.balance.chain import chain
from octavo.balance.cost import Ask
from octavo.balance.prefix_index import ReplicaPrefixes
from octavo.balance.replica import Replica
from octavo.balance.router import Router
from octavo.gateway.body import BLOCK_TOKENS as GATEWAY_BLOCK
from octavo.gateway.body import Relayed, read_outline
from octavo.gateway.upstream import DEFAULT, Place
from octavo.gateway.upstream_cache import MOST_SENT, SentPrompt, UpstreamCache
from octavo.gateway.upstreams import Upstreams
from octavo.simulate.engine import BLOCK_TOKENS, SimulatedEngine, SimulatedRequest, Speed

SPEED = Speed(prefill=2000, step=0.02, slots=16, chunk=512, cache=65_536)
PREFIX, QUESTION, REPLY = 2048, 256, 64  # tokens
GROUPS = 23  # for each replica: 72 % of its cache
REQUESTS = 400  # for each replica
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
    """A replica in the simulation. waits: tokens to compute for jobs without a first token. sent:
    what is held of the prompts of jobs that have not ended."""

    name: str
    engine: SimulatedEngine = field(default_factory=lambda: SimulatedEngine(SPEED))
    waits: dict[str, int] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    busy: bool = False
    sent: dict[str, SentPrompt | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache = UpstreamCache(self.name)

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


class Simulation:
    """Requests at given times, until the last has ended."""

    def __init__(self, way: str, replicas: int) -> None:
        self._known = WAYS[way]
        self._index = ReplicaPrefixes() if self._known == "blocks" else ReplicaPrefixes(MOST_SENT)
        self._router = Router(way.partition(", ")[0], self._index)
        self._servers = {str(i): Server(str(i)) for i in range(replicas)}
        for server in self._servers.values():
            self._router.fleet.put(server.figures)
            server.cache.tells = self._known == "prompts"
            server.cache.resize(self._index, SPEED.cache if self._known == "size" else 0)
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
            self._at(now, SimulatedRequest(str(i), PREFIX + QUESTION, REPLY, blocks, str(i)))
        end = 0.0
        while self._heap:
            end, _, what = heapq.heappop(self._heap)
            if isinstance(what, SimulatedRequest):
                self._route(what, end)
            else:
                what()  # type: ignore[operator]
        asked = len(made) * (PREFIX + QUESTION)
        return Result(self._ttft, self._given / end, self._found / asked)

    def _at(self, when: float, what: object) -> None:
        heapq.heappush(self._heap, (when, next(self._serial), what))

    def _route(self, job: SimulatedRequest, now: float) -> None:
        ask = Ask(job.prompt, tuple(job.blocks), BLOCK_TOKENS, reply=REPLY, id=job.id)
        if self._known != "blocks":  # a gateway's are larger
            ratio = GATEWAY_BLOCK // BLOCK_TOKENS
            ask = replace(ask, blocks=ask.blocks[ratio - 1 :: ratio], block=GATEWAY_BLOCK)
        route = self._router.choose(ask)
        assert route is not None
        server = self._servers[route.replica]
        if self._known != "blocks":
            server.sent[job.id] = server.cache.begin(self._index, ask)
        self._came[job.id] = now
        server.waits[job.id] = job.prompt - route.cost.cached
        server.engine.submit(job)
        self._router.fleet.put(server.figures)
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
            if self._known == "blocks":
                self._index.stored(server.name, done.stored)
                self._index.removed(server.name, done.removed)
            elif self._known == "prompts":
                server.cache.told(done.prompts)
            for job in done.finished:
                server.cache.end(server.sent.pop(job, None))
            self._router.fleet.put(server.figures)
            self._step(server, end)

        self._at(end, ended)


def compare(replicas: int, load: float) -> None:
    made = prompts(replicas, seed=7)
    most = Simulation("cost", replicas).run(made, float("inf")).throughput / REPLY
    print(f"\n{replicas} replicas, {len(made):,} requests, {load:.0%} of {most:.1f} requests/s")
    print(f"{'':20} {'TTFT p50':>10} {'p90 ms':>10} {'p99':>10} {'tokens/s':>12} {'cached':>9}")
    for way in WAYS:
        print(Simulation(way, replicas).run(made, load * most).line(way), flush=True)


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
        upstreams.up(one, {"m": 0}, True)
        if i % 2:
            lease = upstreams.choose(DEFAULT, "m", ask).lease
            assert lease is not None and lease.upstream is one
            lease.end()
        upstreams.drain(one)  # for now, so that each is the only one in its turn
    for one in upstreams:
        upstreams.up(one, {"m": 0}, True)
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
    parser.add_argument("--decisions", action="store_true", help="time decisions instead")
    options = parser.parse_args()
    if options.decisions:
        return decisions()
    for replicas in options.replicas:
        compare(replicas, options.load)


if __name__ == "__main__":
    main()
