"""Metrics for Prometheus: engines count tokens and blocks, the server requests and times."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    Info,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from octavo import __version__
from octavo.generate.gaps import BOUNDS, Gaps
from octavo.server.counts import CountSeries, HistogramSeries
from octavo.server.engine_metrics import EngineCollector, ProcessesCollector
from octavo.server.exchange import Exchange
from octavo.server.exposition import exposition
from octavo.server.metric_table import BUILD, METRICS
from octavo.server.phases import phases
from octavo.server.registry import Entry


class GapsCollector(Collector):
    """Times between tokens, which requests have counted themselves."""

    def __init__(self) -> None:
        self._models: dict[str, tuple[list[int], float]] = {}

    def add(self, model: str, gaps: Gaps) -> None:
        counts, total = self._models.get(model, ([0] * len(gaps.counts), 0.0))
        added = [a + b for a, b in zip(counts, gaps.counts, strict=True)]
        self._models[model] = added, total + gaps.total

    def collect(self) -> Iterator[HistogramMetricFamily]:
        known = METRICS["octavo_inter_token_seconds"]
        found = HistogramMetricFamily(known.name, known.meaning, labels=known.labels)
        bounds = [*map(str, BOUNDS), "+Inf"]
        for model, (counts, total) in self._models.items():
            found.add_metric([model], list(zip(bounds, accumulate(counts), strict=True)), total)
        yield found


class Metrics:
    """The metrics of one server, which are in a registry of its own. models: whose engines are
    asked for theirs."""

    def __init__(self, models: Iterable[Entry] = ()) -> None:
        self.registry = registry = CollectorRegistry()
        self._gaps = GapsCollector()
        for collector in (EngineCollector(models), ProcessesCollector(models), self._gaps):
            registry.register(collector)
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        build = Info(BUILD.name, BUILD.meaning, registry=registry)
        build.info({"version": __version__, "python": platform.python_version()})
        self._requests = self._counter("octavo_requests")
        self._refused = self._counter("octavo_refused_requests")
        self._replayed = self._counter("octavo_replayed_requests")
        self._finished = self._counter("octavo_request_finished")
        self._tokens = self._counter("octavo_tokens")
        self._signs = self._counter("octavo_answer_signs")
        self._slow = self._counter("octavo_slow_requests")
        self._spikes = self._counter("octavo_memory_spikes")
        self._first = self._histogram("gen_ai_server_time_to_first_token_seconds")
        self._each = self._histogram("gen_ai_server_time_per_output_token_seconds")
        self._whole = self._histogram("gen_ai_server_request_duration_seconds")
        self._prompt = self._histogram("octavo_request_prompt_tokens")
        self._generated = self._histogram("octavo_request_generation_tokens")
        self._phases = {
            phase: self._histogram(f"octavo_request_{phase}_time_seconds")
            for phase in ("receive", "queue", "prefill", "decode")
        }

    def _counter(self, name: str) -> CountSeries:
        counter = CountSeries(METRICS[name])
        self.registry.register(counter)
        return counter

    def _histogram(self, name: str) -> HistogramSeries:
        histogram = HistogramSeries(METRICS[name])
        self.registry.register(histogram)
        return histogram

    def finished(self, one: Exchange) -> None:
        """Counts a request that has ended."""
        self._requests.add(1, one.route, str(one.status))
        self._replayed.add(one.replayed)
        if one.status in (429, 503) and one.code is not None:
            self._refused.add(1, one.code)
        usage, model = one.usage, one.model
        if usage is None or model is None:
            return
        for reason in usage.finishes:
            self._finished.add(1, model, reason)
        for sign in usage.signs:
            self._signs.add(1, model, sign)
        self._tokens.add(usage.prompt, model, "input", one.outcome)
        self._tokens.add(usage.completion, model, "output", one.outcome)
        if one.status == 200:
            self._whole.add(one.seconds, one.operation, model)
            self._prompt.add(usage.prompt, model)
        if usage.first is not None and usage.last is not None:
            self._timed(one, model)

    def _timed(self, one: Exchange, model: str) -> None:
        """Counts the times of a request that got tokens."""
        usage = one.usage
        assert usage is not None and usage.first is not None and usage.last is not None
        self._first.add(one.ttft or 0.0, one.operation, model)
        self._generated.add(usage.completion, model)
        self._gaps.add(model, usage.gaps)
        if usage.completion > 1:
            mean = (usage.last - usage.first) / (usage.completion - 1)
            self._each.add(mean, one.operation, model)
        spent = phases(one)
        for phase in self._phases.keys() & spent.keys():
            self._phases[phase].add(spent[phase], model)

    def slow(self, model: str, cause: str) -> None:
        """Counts a request that was far slower than those before it."""
        self._slow.add(1, model, cause)

    def spiked(self, model: str, cause: str) -> None:
        """Counts a spike of memory of a model's engine, or with "" of the server."""
        self._spikes.add(1, model, cause)

    def render(self) -> bytes:
        return exposition(self.registry.collect())
