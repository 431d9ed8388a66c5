"""Which requests are taken and how long they will wait, by what is in flight and by the engine.

What is told to a client that is refused follows from how fast the engine is now, so that whoever
comes back when it was told to is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from octavo.client.replay import Stream
from octavo.engine.plan import Plan
from octavo.engine.policy import service_class
from octavo.errors import Overloaded

SHARES = (1.25, 1.0, 0.75)  # of a queue that requests of P0, P1 and P2 may fill
LIGHT = 1.25  # the same for a tenant that has less than an equal share of what is in flight
TOO_LATE = "deadline_exceeded"
MOST_PIXELS = 512 << 20  # bytes of images in flight, which server and engine hold each
SOONEST = 0.05  # seconds after which a client is told to come again, at least


def known(stats: Mapping[str, int], streams: int, plan: Plan, restarts: int) -> dict[str, int]:
    """An engine's latest counts, and what the front knows: requests in flight, which an engine that
    has stopped has not counted, bytes of KV blocks, and how often it was replaced."""
    cache = plan.cache + (plan.draft.cache if plan.draft else 0)
    waiting = max(stats.get("waiting", 0), streams - stats.get("running", 0))
    kv = stats.get("blocks_reached", 0) * cache // max(1, plan.limits.blocks)
    return {**stats, "waiting": waiting, "kv_bytes": kv, "restarts": restarts}


@dataclass(frozen=True)
class Load:
    """What an engine does and how fast: requests in flight, and seconds of a step of texts and of a
    token of a prompt, 0 before they are measured. places: sequences that are computed together."""

    streams: Collection[Stream]
    places: int
    step: float = 0.0
    prompt_token: float = 0.0

    @classmethod
    def of(cls, streams: Collection[Stream], places: int, stats: Mapping[str, int]) -> Load:
        """As the engine's latest counts say."""
        step, token = stats.get("step_us", 0) / 1e6, stats.get("prompt_token_ns", 0) / 1e9
        return cls(streams, places, step, token)

    @property
    def waiting(self) -> int:
        """Prompt tokens of requests that have no token yet. The choices of a prompt, which are
        given the same list, have it computed once."""
        prompts = (s.request.prompt for s in self.streams if not s.given)
        return sum({id(prompt): len(prompt) for prompt in prompts}.values())

    @property
    def pixels(self) -> int:
        """Bytes of images in flight; the choices of a prompt have the same."""
        images = (i for s in self.streams for i in s.request.images)
        return sum({id(i): len(i.pixels) for i in images}.values())

    def begun(self, group: str) -> bool:
        """Whether a request of a group is in flight."""
        return bool(group) and any(s.request.group == group for s in self.streams)

    @cached_property
    def _mean(self) -> float:
        """Tokens that requests have until now, of those that have any."""
        given = [len(s.given) for s in self.streams if s.given]
        return sum(given) / len(given) if given else 0.0

    def _left(self, stream: Stream) -> float:
        """Seconds until a request ends once it has its place; one that names no number of tokens
        goes on for as long as others have until now."""
        request, most = stream.request, stream.request.params.max_tokens
        if request.pool:
            return 0.0
        if most is None:
            return self.step * self._mean
        return self.step * max(0, most - len(stream.given))

    def wait(self, new: Stream) -> float:
        """Seconds that a request that comes now waits for others before its first step.

        Tenants take turns: of another's prompts no more come before it than of its own tenant's,
        and at worst its tenant gets an equal share of the places.
        """
        request = new.request
        level, tenant = request.priority, request.tenant
        before = [s for s in self.streams if s.request.priority <= level]
        begun = [s for s in before if s.given]
        mine = [s for s in begun if s.request.tenant == tenant]
        ahead, seen = Counter[str](), {id(request.prompt)}
        count = tokens = 0  # of requests that come first: of its tenant; of a higher class, all
        for stream in before:
            other = stream.request
            if stream.given:
                continue
            length = 0 if id(other.prompt) in seen else len(other.prompt)
            if other.priority < level:
                tokens += length
            elif other.tenant != tenant or stream.due <= new.due:
                ahead[other.tenant] += length
                count += other.tenant == tenant
            else:
                continue
            seen.add(id(other.prompt))
        own = ahead.pop(tenant, 0)
        most = own + len(request.prompt)
        tokens += own + sum(min(most, n) for n in ahead.values())
        prompts = tokens * self.prompt_token
        share = max(1, self.places // len({tenant, *(s.request.tenant for s in before)}))
        room = max(self.places - len(begun), share - len(mine))
        if count < room:
            return prompts
        ends = sorted(self._left(s) for s in mine or begun)
        rounds, last = divmod(count - room, max(1, len(ends)))
        return max(prompts, ends[last] + rounds * ends[-1]) if ends else prompts

    def until_one_ends(self, of: Collection[Stream]) -> float:
        """Seconds until one of some requests in flight ends."""
        waited = self.waiting * self.prompt_token
        ends = [self._left(s) + (0 if s.given else waited) for s in of]
        return min(ends, default=0.0)


@dataclass(frozen=True)
class QueueLimits:
    """Most requests in flight, most tokens of prompts among them that wait for a first token, and
    most bytes of their images.

    A quarter more is kept free for P0 and for tenants with less than an equal share; P2 leaves a
    quarter to others. Prompts of one group are not refused for each other's tokens and images, nor
    a prompt for its own: it would never be taken.
    """

    requests: int = 256
    tokens: int | None = None
    pixels: int = MOST_PIXELS

    def divided(self, engines: int) -> QueueLimits:
        """What each of several engines has of it."""
        tokens = None if self.tokens is None else -(-self.tokens // engines)
        return QueueLimits(-(-self.requests // engines), tokens, -(-self.pixels // engines))

    def check(self, new: Stream, load: Load) -> None:
        """Raises Overloaded for a request that is not taken now, or that would get its first token
        too late for others' work."""
        request, streams = new.request, load.streams
        tenants = {request.tenant, *(s.request.tenant for s in streams)}
        share = SHARES[service_class(request.priority)]
        own = sum(s.request.tenant == request.tenant for s in streams)
        if own * len(tenants) < len(streams):  # never of the only tenant
            share = max(share, LIGHT)
        if len(streams) >= max(1, int(self.requests * share)):
            many = f"{len(streams)} requests are in flight, which is the limit"
            raise _overloaded(many, load.until_one_ends(streams))
        waiting = load.waiting
        if self.tokens is not None and waiting and not load.begun(request.group):
            excess = waiting + len(request.prompt) - int(self.tokens * share)
            if excess > 0:
                many = f"{waiting:,} tokens of prompts wait; {self.tokens:,} may"
                raise _overloaded(many, excess * load.prompt_token)
        if request.images and (held := load.pixels) and not load.begun(request.group):
            if held + sum(len(i.pixels) for i in request.images) > int(self.pixels * share):
                many = f"{held >> 20:,} MiB of images are in flight; {self.pixels >> 20:,} may be"
                shown = [s for s in streams if s.request.images]
                raise _overloaded(many, load.until_one_ends(shown))
        for name, seconds in (("x-slo-ttft-ms", request.ttft), ("timeout", request.timeout)):
            if seconds is not None and (wait := load.wait(new)):
                if wait + len(request.prompt) * load.prompt_token > seconds:
                    late = f"the first token would come after {wait:.2f} s of others' work"
                    raise _overloaded(f"{late}, not in {seconds:g} s", wait, name, TOO_LATE)


DEFAULT_QUEUE = QueueLimits()


def _overloaded(
    message: str, seconds: float, param: str | None = None, code: str = "overloaded"
) -> Overloaded:
    return Overloaded(message, param, code, max(SOONEST, seconds))
