"""The text of metrics is that of Prometheus's own client."""

from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from octavo.server.exposition import exposition
from octavo.server.metrics import Metrics

disable_created_metrics()  # type: ignore[no-untyped-call]  # a server has none
TEXTS = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4)
VALUES = st.floats() | st.integers(-(1 << 60), 1 << 60) | st.sampled_from([math.inf, math.nan, 1e6])


@given(TEXTS, st.lists(VALUES, min_size=1, max_size=4), st.text())
@example(['"', "\\", "\n"], [1e6], "a\\b\nc")  # all that is escaped
def test_as_prometheus_writes_it(labels: list[str], values: list[float], meaning: str) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("some_gauge", meaning, ("z", "a"), registry=registry)
    counter = Counter("some", "counts", ("a",), registry=registry)
    times = Histogram("some_seconds", "times", ("a",), buckets=(0.5, 1e7), registry=registry)
    Info("some_build", "what it is", registry=registry).info({"version": labels[0]})
    for label in labels:
        counter.labels(label).inc(abs(values[0]))
        for value in values:
            gauge.labels(label, "b").set(value)
            times.labels(label).observe(value)
    assert exposition(registry.collect()) == generate_latest(registry)


def test_of_a_server() -> None:
    registry = Metrics().registry
    names = {line.split(" ")[0] for line in exposition(registry.collect()).decode().splitlines()}
    assert names == {line.split(" ")[0] for line in generate_latest(registry).decode().splitlines()}


def test_empty_labels() -> None:
    family = GaugeMetricFamily("some_gauge", "means something", labels=["a", "b"])
    family.add_metric(["", ""], 1)
    family.add_metric(["x", ""], 2)
    text = exposition([family]).decode()
    assert text.splitlines()[2:] == ["some_gauge 1.0", 'some_gauge{a="x"} 2.0']
    (read,) = text_string_to_metric_families(text)
    assert [s.labels for s in read.samples] == [{}, {"a": "x"}]
