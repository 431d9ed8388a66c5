"""Numbers for Prometheus: the engine counts tokens and blocks, the front requests and times."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.server.client import EngineClient
from octavo.server.generation import Usage

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class _EngineCollector(Collector):
    """Reads the engine's latest counts when scraped."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def collect(self) -> Iterator[Metric]:
        stats = self._client.stats
        for name in ("running", "waiting"):
            yield GaugeMetricFamily(
                f"octavo_requests_{name}", f"Requests {name}", stats.get(name, 0)
            )
        blocks = GaugeMetricFamily("octavo_kv_blocks", "KV blocks by state", labels=["state"])
        free, cached = stats.get("blocks_free", 0), stats.get("blocks_cached", 0)
        total = stats.get("blocks", 0)
        for state, value in (("free", free), ("cached", cached), ("held", total - free - cached)):
            blocks.add_metric([state], value)
        yield blocks
        for name in ("prompt_tokens", "cached_tokens", "generated_tokens", "preemptions", "steps"):
            text = name.replace("_", " ").capitalize()
            yield CounterMetricFamily(f"octavo_{name}", text, stats.get(name, 0))
        yield CounterMetricFamily(
            "octavo_engine_restarts", "Engine restarts", self._client.restarts
        )


class Metrics:
    """One registry per server; nothing global."""

    def __init__(self, client: EngineClient) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(client))
        self._requests = Counter(
            "octavo_requests",
            "Requests by route and status",
            ["route", "status"],
            registry=self._registry,
        )
        self._first = Histogram(
            "octavo_time_to_first_token_seconds", "From arrival to the first token",
            buckets=SECONDS, registry=self._registry,
        )  # fmt: skip
        self._between = Histogram(
            "octavo_inter_token_seconds", "Mean time between tokens of a request",
            buckets=SECONDS, registry=self._registry,
        )  # fmt: skip

    def finished(self, route: str, status: int, usage: Usage | None = None) -> None:
        """Counts a request; `route` is one of a fixed few."""
        self._requests.labels(route, str(status)).inc()
        if usage and usage.first is not None and usage.last is not None:
            self._first.observe(usage.first - usage.began)
            if usage.completion > 1:
                self._between.observe((usage.last - usage.first) / (usage.completion - 1))

    def render(self) -> bytes:
        return bytes(generate_latest(self._registry))
