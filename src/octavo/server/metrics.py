"""Metrics for Prometheus: engines count tokens and blocks, the server requests and times."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from functools import partial

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

from octavo import __version__
from octavo.client.base import EngineClient
from octavo.client.replicas import engines
from octavo.server.exchange import Exchange
from octavo.server.registry import Entry

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKENS = tuple(float(1 << i) for i in range(18))


SOURCES = ("forced", "prediction", "lookup", "recent", "draft", "self")  # of drafts
COUNTS = (
    "prompt_tokens", "cached_tokens", "generated_tokens", "preemptions", "steps", "images_encoded",
    "image_hits",
)  # fmt: skip


class _EngineCollector(Collector):
    """Reads the latest counts of every engine when scraped."""

    def __init__(self, models: Iterable[Entry]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        blocks = GaugeMetricFamily(
            "octavo_kv_blocks", "KV blocks by state", labels=[*LABELS, "state"]
        )
        queues = [_gauge(f"requests_{name}", f"Requests {name}") for name in ("running", "waiting")]
        times = [
            (_gauge("step_seconds", "What a step without prompts takes now"), "step_us", 1e6),
            (_gauge("prompt_token_seconds", "What a prompt token takes now, with all beside it"),
             "prompt_token_ns", 1e9),
        ]  # fmt: skip
        counts = [_counter(name, name.replace("_", " ").capitalize()) for name in COUNTS]
        restarts = _counter("engine_restarts", "Engine restarts")
        lost = _counter("speculation_lost_seconds", "Time that rejected drafts took")
        drafts = [
            CounterMetricFamily(
                f"octavo_{kind}_draft_tokens", f"Tokens of drafts {kind}",
                labels=[*LABELS, "source"],
            )
            for kind in ("verified", "accepted")
        ]  # fmt: skip
        for labels, client in _engines(self._models):
            stats = client.stats
            for name, queue in zip(("running", "waiting"), queues, strict=True):
                queue.add_metric(labels, stats.get(name, 0))
            free, cached = stats.get("blocks_free", 0), stats.get("blocks_cached", 0)
            held = stats.get("blocks", 0) - free - cached
            for state, value in (("free", free), ("cached", cached), ("held", held)):
                blocks.add_metric([*labels, state], value)
            for name, counter in zip(COUNTS, counts, strict=True):
                counter.add_metric(labels, stats.get(name, 0))
            for time, name, unit in times:
                time.add_metric(labels, stats.get(name, 0) / unit)
            restarts.add_metric(labels, stats.get("restarts", 0))
            lost.add_metric(labels, stats.get("speculation_lost_us", 0) / 1e6)
            for name, family in zip(("drafted", "accepted"), drafts, strict=True):
                for source in SOURCES:
                    family.add_metric([*labels, source], stats.get(f"{name}_{source}", 0))
        families = (
            *queues,
            blocks,
            *(time for time, *_ in times),
            *counts,
            restarts,
            lost,
            *drafts,
        )
        yield from map(_without_empty, families)


LABELS = ["model_name", "replica"]


def _engines(models: Iterable[Entry]) -> Iterator[tuple[list[str], EngineClient]]:
    """The engines of loaded models with their labels; a model's only engine is no replica."""
    for entry in models:
        if entry.client is not None:
            for name, client in engines(entry.client).items():
                yield [entry.name, name], client


def _without_empty(family: Metric) -> Metric:
    """A metric without labels that say nothing."""
    family.samples = [
        s._replace(labels={k: v for k, v in s.labels.items() if v}) for s in family.samples
    ]
    return family


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"octavo_{name}", text, labels=LABELS)


def _counter(name: str, text: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"octavo_{name}", text, labels=LABELS)


class _EngineProcessCollector(Collector):
    """Memory, processor time and handles of every engine process."""

    def __init__(self, models: Iterable[Entry]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for (model, replica), client in _engines(self._models):
            if (pid := client.pid) is None:
                continue
            labels = {"model_name": model} | ({"replica": replica} if replica else {})
            process = ProcessCollector("octavo_engine", partial(int, pid), registry=None)
            for metric in process.collect():
                family = families.setdefault(metric.name, metric)
                samples = [s._replace(labels=labels) for s in metric.samples]
                family.samples = samples if family is metric else family.samples + samples
        yield from families.values()


class Metrics:
    """The metrics of one server, which are in a registry of its own. models: whose engines are
    asked for theirs."""

    def __init__(self, models: Iterable[Entry] = ()) -> None:
        self.registry = registry = CollectorRegistry()
        registry.register(_EngineCollector(models))
        registry.register(_EngineProcessCollector(models))
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        build = Info("octavo_build", "What is running", registry=registry)
        build.info({"version": __version__, "python": platform.python_version()})
        self._requests = Counter(
            "octavo_requests", "Requests by route and status", ["route", "status"],
            registry=registry,
        )  # fmt: skip
        self._refused = Counter(
            "octavo_refused_requests", "Requests refused for load or limits", ["code"],
            registry=registry,
        )  # fmt: skip
        self._replayed = Counter(
            "octavo_replayed_requests", "Requests answered as before, by their idempotency keys",
            registry=registry,
        )  # fmt: skip
        self._finished = Counter(
            "octavo_request_finished", "Choices by how they ended",
            ["model_name", "finished_reason"], registry=registry,
        )  # fmt: skip

        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            name = f"octavo_{name}"
            return Histogram(name, text, ["model_name"], buckets=buckets, registry=registry)

        self._first = histogram("time_to_first_token_seconds", "From arrival to the first token")
        self._between = histogram("inter_token_seconds", "Mean time between tokens of a request")
        self._latency = histogram(
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
        self._replayed.inc(one.replayed)
        if one.status in (429, 503) and one.code is not None:
            self._refused.labels(one.code).inc()
        usage, model = one.usage, one.model
        if usage is None or model is None:
            return
        for reason in usage.finishes:
            self._finished.labels(model, reason).inc()
        if one.status == 200:
            self._latency.labels(model).observe(one.seconds)
            self._prompt.labels(model).observe(usage.prompt)
        if usage.first is not None and usage.last is not None:
            self._first.labels(model).observe(usage.first - usage.began)
            self._queued.labels(model).observe(usage.queued)
            self._generated.labels(model).observe(usage.completion)
            if usage.completion > 1:
                mean = (usage.last - usage.first) / (usage.completion - 1)
                self._between.labels(model).observe(mean)

    def render(self) -> bytes:
        return bytes(generate_latest(self.registry))
