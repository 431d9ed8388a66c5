"""Asks upstreams which models they have, which also tells whether they answer."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import msgspec

from octavo.balance.replica import ReplicaTimes
from octavo.errors import place
from octavo.gateway.cache_subscriptions import CacheSubscriptions
from octavo.gateway.errors import Exhausted, UpstreamFailed
from octavo.gateway.transport import Transport
from octavo.gateway.upstream import ANY, ModelFigures, Place, Upstream
from octavo.gateway.upstreams import Upstreams
from octavo.server.parsing import NOT_JSON

LOG = logging.getLogger("octavo.gateway")
MOST = 1e15  # of a figure
OWNER = "octavo"  # of the models of a server whose streams can go on elsewhere
KEYLESS = "it wants a key (--upstream-key)"
# What statuses of a probe mean.
MEANING = {401: KEYLESS, 403: KEYLESS, 508: "it is this gateway itself: name others"}


@dataclass(frozen=True)
class HealthCheck:
    """interval: seconds between probes. timeout: of one. misses: after so many an upstream is
    down; at once if it takes no connection. returns: so many good ones bring it back."""

    interval: float = 2.0
    timeout: float = 2.0
    misses: int = 3
    returns: int = 2


class _Card(msgspec.Struct):
    id: str
    owned_by: str = ""
    cache_tokens: object = None  # of Octavo's, as are times
    times: object = None
    max_model_len: object = None

    @property
    def figures(self) -> ModelFigures:
        size, times = self.cache_tokens, self.times
        said = times.get if isinstance(times, dict) else {}.get
        seconds = (_sound(said(each)) for each in ("prompt_token", "step", "image"))
        context = int(_sound(self.max_model_len))
        return ModelFigures(int(_sound(size)), ReplicaTimes(*seconds), context)


def _sound(number: object) -> float:
    """A figure that can be reckoned with, 0 for none."""
    return number if isinstance(number, int | float) and 0 <= number < MOST else 0


class _Cards(msgspec.Struct):
    data: list[_Card]


class Health:
    """Probes every upstream, for as long as it is there. passes_keys: upstreams see the keys of
    clients, unless they have one of their own."""

    def __init__(
        self, upstreams: Upstreams, transport: Transport, check: HealthCheck,
        passes_keys: bool = False,
    ) -> None:  # fmt: skip
        self._upstreams, self._transport, self.check = upstreams, transport, check
        self._passes_keys = passes_keys
        self._subscriptions = CacheSubscriptions(upstreams, transport)
        self._tasks: dict[Upstream, asyncio.Task[None]] = {}
        self._asked: dict[Upstream, asyncio.Event] = {}
        self._retired: set[Upstream] = set()
        self._lack = ""  # why nobody can be connected to, once it was said

    def add(self, place: Place) -> Upstream:
        """Takes an upstream in; it gets requests once it has answered."""
        upstream = self._upstreams.add(place)
        self._retired.discard(upstream)
        if upstream not in self._tasks:
            self._asked[upstream] = asyncio.Event()
            self._tasks[upstream] = asyncio.create_task(self._watch(upstream))
        self.look(upstream)
        return upstream

    def remove(self, upstream: Upstream) -> None:
        """Forgets an upstream."""
        if (task := self._tasks.pop(upstream, None)) is not None:
            task.cancel()
        self._asked.pop(upstream, None)
        self._retired.discard(upstream)
        self._subscriptions.leave(upstream)
        self._upstreams.remove(upstream)

    def retire(self, upstream: Upstream) -> None:
        """Drains an upstream, and forgets it once it has nothing left to do."""
        self._upstreams.drain(upstream)
        self._retired.add(upstream)
        self.look(upstream)

    def look(self, upstream: Upstream) -> None:
        """Probes an upstream now, since a request to it has failed."""
        if upstream in self._asked:
            self._asked[upstream].set()

    async def _watch(self, upstream: Upstream) -> None:
        good, asked = 0, self._asked[upstream]
        while True:
            if upstream in self._retired and not upstream.requests:
                return self.remove(upstream)
            asked.clear()
            try:
                figures, own = await self._probe(upstream)
            except Exhausted as e:
                if str(e) != self._lack:
                    LOG.error("%s", e)
                self._lack = str(e)
            except Exception as e:  # whatever it is, it is not the last probe
                good = 0
                self._missed(upstream, e)
            else:
                good, upstream.misses, self._lack = good + 1, 0, ""
                back = upstream.state != "down" or good >= self.check.returns
                if upstream.state != "draining" and back:
                    self._upstreams.up(upstream, figures, own)
                    self._subscriptions.follow(upstream)
            # one that is coming back is asked again soon, one that starts is not kept waiting
            soon = upstream.state == "starting" or (upstream.state == "down" and good)
            pause = self.check.interval / (10 if soon else 1)
            try:
                async with asyncio.timeout(pause):
                    await asked.wait()
                    await asyncio.sleep(self.check.interval / 10)
            except TimeoutError:
                pass

    def _missed(self, upstream: Upstream, error: Exception) -> None:
        """A probe was not answered as it has to be."""
        upstream.misses += 1
        if isinstance(error, UpstreamFailed):
            gone, reason = error.code == "upstream_down", str(error)
        else:
            gone, reason = False, f"upstream {upstream.id} cannot be probed: {place(error)}"
        if gone or upstream.misses >= self.check.misses:
            self._upstreams.down(upstream, reason)

    async def _probe(self, upstream: Upstream) -> tuple[dict[str, ModelFigures], bool]:
        """The models of an upstream, and whether it is Octavo. Raises UpstreamFailed."""
        timeout = self.check.timeout
        status, text = await self._transport.get(upstream, "/v1/models", timeout)
        if status in (401, 403) and self._passes_keys and upstream.place.key is None:
            return self._unsaid(upstream), False
        if status != 200:
            hint = f"; {meaning}" if (meaning := MEANING.get(status)) else ""
            raise UpstreamFailed(f"upstream {upstream.id} answers /v1/models with {status}{hint}")
        try:
            cards = msgspec.json.decode(text, type=_Cards).data
        except NOT_JSON:
            raise UpstreamFailed(
                f"upstream {upstream.id} is no OpenAI-compatible server: /v1/models is no list"
            ) from None
        figures = {card.id: card.figures for card in cards}
        return figures, bool(cards) and all(card.owned_by == OWNER for card in cards)

    @staticmethod
    def _unsaid(upstream: Upstream) -> dict[str, ModelFigures]:
        """The models of an upstream that says them only to who has a key, as clients do."""
        if ANY not in upstream.models:
            LOG.warning(
                "upstream %s says its models only to who has a key: it is asked for any, with "
                "clients' keys; --upstream-key KEY has the gateway know them", upstream.id,
            )  # fmt: skip
        return {ANY: ModelFigures()}

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(
            *self._tasks.values(), self._subscriptions.close(), return_exceptions=True
        )
        self._tasks.clear()
