"""Metrics of the gateway, beside those that every server has."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from octavo.gateway.admission import UpstreamQueue
from octavo.gateway.events import Finished
from octavo.gateway.response_cache import ResponseCache
from octavo.gateway.upstreams import Upstreams
from octavo.server.engine_metrics import family
from octavo.server.metric_table import METRICS, UPSTREAMS
from octavo.server.metrics import Metrics

STATES = ("starting", "up", "draining", "down")


class _UpstreamCollector(Collector):
    """Reads what is known of every upstream when scraped."""

    def __init__(self, upstreams: Upstreams, admission: UpstreamQueue) -> None:
        self._upstreams, self._admission = upstreams, admission

    def collect(self) -> Iterator[Metric]:
        state, opened, running, waiting = map(family, UPSTREAMS)
        line = family(METRICS["octavo_gateway_waiting"])
        line.add_metric([], self._admission.waiting)
        for up in self._upstreams:
            for each in STATES:
                state.add_metric([up.id, each], up.state == each)
            opened.add_metric([up.id], up.breaker.state != "closed")
            running.add_metric([up.id], up.running)
            waiting.add_metric([up.id], up.waiting)
        yield from (state, opened, running, waiting, line)


class _CacheCollector(Collector):
    """Reads the response cache when scraped."""

    def __init__(self, cache: ResponseCache) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        cache = self._cache
        asked = family(METRICS["octavo_response_cache"])
        asked.add_metric(["hit"], cache.hits)
        asked.add_metric(["miss"], cache.misses)
        kept = family(METRICS["octavo_response_cache_bytes"])
        kept.add_metric([], cache.size)
        yield from (asked, kept)


class GatewayMetrics(Metrics):
    """What every server measures, and what became of requests at upstreams."""

    def __init__(self, upstreams: Upstreams, admission: UpstreamQueue) -> None:
        super().__init__()
        self.registry.register(_UpstreamCollector(upstreams, admission))
        self._upstream = self._counter("octavo_upstream_requests")
        self._retries = self._counter("octavo_upstream_retries")
        self._failovers = self._counter("octavo_upstream_failovers")
        self._hedges = self._counter("octavo_upstream_hedges")
        # Both from the start: a rate of what appears later misses the first.
        for won in ("yes", "no"):
            self._hedges.add(0, won)
        self._prepared = self._counter("octavo_gateway_prepared")

    def watch(self, cache: ResponseCache) -> None:
        """Tells of a response cache, too."""
        self.registry.register(_CacheCollector(cache))

    def relayed(self, one: Finished) -> None:
        """Counts a request that has ended."""
        self._upstream.add(1, one.replica, one.version, str(one.status))
        self._retries.add(one.retries)
        self._prepared.add(one.prepared)
        self._failovers.add(one.failovers)
        if one.hedges:
            self._hedges.add(one.hedges, "yes" if one.hedge_won else "no")
