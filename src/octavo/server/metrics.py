"""Numbers for Prometheus: the engine counts tokens and blocks, the front requests and times."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.client.process import EngineProcessClient
from octavo.server.exchange import Exchange

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKENS = tuple(float(1 << i) for i in range(18))


class _EngineCollector(Collector):
    """Reads the engine's latest counts when scraped."""

    def __init__(self, client: EngineProcessClient) -> None:
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

    def __init__(self, client: EngineProcessClient) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_EngineCollector(client))
        ProcessCollector(registry=registry)
        ProcessCollector(
            namespace="octavo_engine", pid=lambda: client.pid or os.getpid(), registry=registry
        )
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        build = Info("octavo_build", "What is running", registry=registry)
        build.info({"version": version("octavo"), "python": platform.python_version()})
        self._requests = Counter(
            "octavo_requests", "Requests by route and status", ["route", "status"],
            registry=registry,
        )  # fmt: skip
        self._finished = Counter(
            "octavo_request_finished", "Choices by how they ended", ["finished_reason"],
            registry=registry,
        )  # fmt: skip

        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(f"octavo_{name}", text, buckets=buckets, registry=registry)

        self._first = histogram("time_to_first_token_seconds", "From arrival to the first token")
        self._between = histogram("inter_token_seconds", "Mean time between tokens of a request")
        self._whole = histogram(
            "e2e_request_latency_seconds", "From arrival to the end of the answer"
        )
        self._queued = histogram(
            "request_queue_time_seconds", "From submission to the first step of the engine"
        )
        self._prompt = histogram("request_prompt_tokens", "Tokens of a request's prompts", TOKENS)
        self._generated = histogram(
            "request_generation_tokens", "Tokens generated for a request", TOKENS
        )

    def finished(self, one: Exchange) -> None:
        """Counts a request that has ended."""
        self._requests.labels(one.route, str(one.status)).inc()
        usage = one.usage
        if usage is None:
            return
        for reason in usage.finishes:
            self._finished.labels(reason).inc()
        if one.status == 200:
            self._whole.observe(one.seconds)
            self._prompt.observe(usage.prompt)
        if usage.first is not None and usage.last is not None:
            self._first.observe(usage.first - usage.began)
            self._queued.observe(usage.queued)
            self._generated.observe(usage.completion)
            if usage.completion > 1:
                self._between.observe((usage.last - usage.first) / (usage.completion - 1))

    def render(self) -> bytes:
        return bytes(generate_latest(self._registry))
