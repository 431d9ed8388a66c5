"""What metrics did between two scrapes of a server, as queries to Prometheus would say it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Key = tuple[str, frozenset[tuple[str, str]]]  # name and labels
Series = dict[Key, float]
Values = dict[str, float]  # by the values of labels, "" where there are none
ENGINE = "model_name replica"  # labels of one engine, whose value is "m", or "m/0" of several


def read(text: str) -> Series:
    """The samples of a scrape."""
    families = text_string_to_metric_families(text)
    return {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}


@dataclass(frozen=True)
class ScrapeWindow:
    """Two scrapes, and the seconds between them. before: {} for the start of the server. between:
    scrapes of which gauges are told the mean, beside the last.

    Values are sums of what is alike in the labels `by`.
    """

    before: Series
    after: Series
    seconds: float
    between: tuple[Series, ...] = ()

    def _sum(
        self, name: str, by: str, value: Callable[[Key], float], where: dict[str, tuple[str, ...]]
    ) -> Values:
        found: Values = {}
        for key in self.after:
            labels = dict(key[1])
            if key[0] == name and all(labels.get(k) in values for k, values in where.items()):
                group = "/".join(labels[label] for label in by.split() if label in labels)
                found[group] = found.get(group, 0.0) + value(key)
        return found

    def last(self, name: str, by: str = "model_name", **where: tuple[str, ...]) -> Values:
        """Gauges as they are now."""
        return self._sum(name, by, lambda key: self.after[key], where)

    def mean(self, name: str, by: str = "model_name", **where: tuple[str, ...]) -> Values:
        """Gauges as they were on average."""
        looks = [
            ScrapeWindow({}, one, 0).last(name, by, **where) for one in (*self.between, self.after)
        ]
        return {k: sum(look.get(k, 0.0) for look in looks) / len(looks) for k in looks[-1]}

    def increase(self, name: str, by: str = "model_name", **where: tuple[str, ...]) -> Values:
        """By how much counters have grown; one that is smaller than before began again."""

        def grown(key: Key) -> float:
            now, then = self.after[key], self.before.get(key, 0.0)
            return now - then if now >= then else now

        return self._sum(name, by, grown, where)

    def rate(self, name: str, by: str = "model_name", **where: tuple[str, ...]) -> Values:
        """Of counters, a second."""
        seconds = max(self.seconds, 1e-9)
        return {k: v / seconds for k, v in self.increase(name, by, **where).items()}

    def quantile(self, q: float, name: str, by: str = "model_name") -> Values:
        """Of a histogram, as `histogram_quantile` has it."""
        name = f"{name}_bucket"
        texts = {dict(labels)["le"] for known, labels in self.after if known == name}
        found: dict[str, list[tuple[float, float]]] = {}
        for text in sorted(texts, key=float):
            for group, count in self.increase(name, by, le=(text,)).items():
                found.setdefault(group, []).append((float(text), count))
        return {group: _quantile(q, buckets) for group, buckets in found.items() if buckets[-1][1]}


def _quantile(q: float, buckets: list[tuple[float, float]]) -> float:
    """buckets: upper bounds with counts up to there, the last without bound."""
    rank, low, before = q * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (rank - before) / max(count - before, 1e-9)
        low, before = bound, count
    return low


def share(part: Values, whole: Values) -> Values:
    """Each part of its whole, where there is one."""
    return {k: part.get(k, 0.0) / v for k, v in whole.items() if v}


def total(values: Iterable[float]) -> Values:
    """A sum over everything, as one value."""
    return {"": sum(values)}
