"""Counters and histograms of what happens in the event loop, which need no locks: requests are
counted in half of the time that those of `prometheus_client` take."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from octavo.server.metric_table import Metric


class CountSeries(Collector):
    """A counter, by its labels; one without labels begins at 0."""

    def __init__(self, known: Metric) -> None:
        self._known = known
        self._values: dict[tuple[str, ...], float] = {} if known.labels else {(): 0.0}

    def add(self, amount: float, *labels: str) -> None:
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def collect(self) -> Iterator[CounterMetricFamily]:
        known = self._known
        found = CounterMetricFamily(known.name, known.meaning, labels=known.labels)
        for labels, value in self._values.items():
            found.add_metric(labels, value)
        yield found


class HistogramSeries(Collector):
    """A histogram, by its labels."""

    def __init__(self, known: Metric) -> None:
        self._known = known
        self._series: dict[tuple[str, ...], tuple[list[int], list[float]]] = {}  # counts and sum

    def add(self, value: float, *labels: str) -> None:
        if (series := self._series.get(labels)) is None:
            series = self._series[labels] = [0] * (len(self._known.buckets) + 1), [0.0]
        counts, total = series
        counts[bisect_left(self._known.buckets, value)] += 1
        total[0] += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        known = self._known
        found = HistogramMetricFamily(known.name, known.meaning, labels=known.labels)
        bounds = [*map(floatToGoString, known.buckets), "+Inf"]
        for labels, (counts, total) in self._series.items():
            found.add_metric(labels, list(zip(bounds, accumulate(counts), strict=True)), total[0])
        yield found
