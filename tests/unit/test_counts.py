"""Counters and histograms tell what those of Prometheus's own client tell."""

from __future__ import annotations

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest

from octavo.server.counts import CountSeries, HistogramSeries
from octavo.server.metric_table import Metric

disable_created_metrics()  # type: ignore[no-untyped-call]  # ours have none
BOUNDS = (0.001, 0.5, 1.0, 131072.0, 1e7)
VALUES = st.lists(st.floats(0, 1e9) | st.sampled_from(BOUNDS), max_size=8)
LABELS = st.lists(st.text(min_size=1, max_size=4), max_size=3)


@given(LABELS, VALUES)
def test_as_prometheus_counts(labels: list[str], values: list[float]) -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    one = prometheus_client.Counter("one", "of them", registry=theirs)
    some = prometheus_client.Counter("some", "of them", ("a", "b"), registry=theirs)
    times = prometheus_client.Histogram("times", "of it", ("a",), registry=theirs, buckets=BOUNDS)
    count = CountSeries(Metric("one", "counter", "", (), "of them"))
    counts = CountSeries(Metric("some", "counter", "", ("a", "b"), "of them"))
    histogram = HistogramSeries(Metric("times", "histogram", "", ("a",), "of it", BOUNDS))
    for each in (count, counts, histogram):
        ours.register(each)
    for value in values:
        one.inc(value)
        count.add(value)
        for label in labels:
            some.labels(label, "x").inc(value)
            counts.add(value, label, "x")
            times.labels(label).observe(value)
            histogram.add(value, label)
    assert generate_latest(ours) == generate_latest(theirs)
