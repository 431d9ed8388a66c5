"""Metrics of the gateway, beside those that every server has."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.gateway.admission import UpstreamQueue
from octavo.gateway.events import Finished
from octavo.gateway.response_cache import ResponseCache
from octavo.gateway.upstreams import Upstreams
from octavo.server.metrics import Metrics

STATES = ("starting", "up", "draining", "down")


class _UpstreamCollector(Collector):
    """Reads what is known of every upstream when scraped."""

    def __init__(self, upstreams: Upstreams, admission: UpstreamQueue) -> None:
        self._upstreams, self._admission = upstreams, admission

    def collect(self) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            "octavo_upstream_state", "1 for the state that an upstream is in",
            labels=["replica", "state"],
        )  # fmt: skip
        opened = _gauge("breaker_open", "1 while an upstream gets nothing because it fails")
        running = _gauge("requests_running", "Requests at an upstream that have a first token")
        waiting = _gauge("requests_waiting", "Requests at an upstream that have none yet")
        line = GaugeMetricFamily("octavo_gateway_waiting", "Requests that wait for an upstream")
        line.add_metric([], self._admission.waiting)
        for up in self._upstreams:
            for each in STATES:
                state.add_metric([up.id, each], up.state == each)
            opened.add_metric([up.id], up.breaker.state == "open")
            running.add_metric([up.id], up.running)
            waiting.add_metric([up.id], up.waiting)
        yield from (state, opened, running, waiting, line)


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"octavo_upstream_{name}", text, labels=["replica"])


class _CacheCollector(Collector):
    """Reads the response cache when scraped."""

    def __init__(self, cache: ResponseCache) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        cache = self._cache
        asked = CounterMetricFamily(
            "octavo_response_cache", "Requests whose answers may be kept", labels=["result"]
        )
        asked.add_metric(["hit"], cache.hits)
        asked.add_metric(["miss"], cache.misses)
        yield asked
        yield GaugeMetricFamily("octavo_response_cache_bytes", "Of answers kept", cache.size)


class GatewayMetrics(Metrics):
    """What every server measures, and what became of requests at upstreams."""

    def __init__(self, upstreams: Upstreams, admission: UpstreamQueue) -> None:
        super().__init__()
        self.registry.register(_UpstreamCollector(upstreams, admission))
        self._upstream = Counter(
            "octavo_upstream_requests", "Requests by who answered last, and how",
            ["replica", "version", "status"], registry=self.registry,
        )  # fmt: skip
        self._retries = Counter(
            "octavo_upstream_retries", "Requests sent again before their first byte",
            registry=self.registry,
        )  # fmt: skip
        self._failovers = Counter(
            "octavo_upstream_failovers", "Streams that went on at another upstream",
            registry=self.registry,
        )  # fmt: skip

        self._hedges = Counter(
            "octavo_upstream_hedges", "Requests that a second upstream got beside a slow one",
            ["won"], registry=self.registry,
        )  # fmt: skip

        self._prepared = Counter(
            "octavo_gateway_prepared", "Prepared answers given when no upstream had one",
            registry=self.registry,
        )  # fmt: skip

    def watch(self, cache: ResponseCache) -> None:
        """Tells of a response cache, too."""
        self.registry.register(_CacheCollector(cache))

    def relayed(self, one: Finished) -> None:
        """Counts a request that has ended."""
        self._upstream.labels(one.replica, one.version, str(one.status)).inc()
        self._retries.inc(one.retries)
        self._prepared.inc(one.prepared)
        self._failovers.inc(one.failovers)
        if one.hedges:
            self._hedges.labels("yes" if one.hedge_won else "no").inc(one.hedges)
