"""What is read when metrics are scraped: counts of engines, and what the kernel says of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.client.base import EngineClient
from octavo.server import metric_table as known
from octavo.server.registry import Entry

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
WORKERS = {"octavo.sandbox.templates": "templates", "octavo.generate.grammar_worker": "grammars"}
Family = CounterMetricFamily | GaugeMetricFamily


def family(metric: known.Metric, *labels: str) -> Family:
    """A metric without values, with further labels."""
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(metric.name, metric.meaning, labels=[*metric.labels, *labels])


def engines_of(models: Iterable[Entry]) -> Iterator[tuple[str, str, EngineClient]]:
    """The engines of loaded models, each with the names of model and replica, which is empty for a
    model's only engine."""
    from octavo.client.replicas import engines  # not before the first scrape

    for entry in models:
        if entry.client is not None:
            for replica, client in engines(entry.client).items():
                yield entry.name, replica, client


class EngineCollector(Collector):
    """The latest counts of every engine."""

    def __init__(self, models: Iterable[Entry]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        families = [family(metric, "replica") for metric in known.ENGINE]
        for model, replica, client in engines_of(self._models):
            stats = dict(client.stats)
            stats["blocks_held"] = (
                stats.get("blocks", 0) - stats.get("blocks_free", 0) - stats.get("blocks_cached", 0)
            )
            for metric, values in zip(known.ENGINE, families, strict=True):
                for labels, value in _read(metric, stats):
                    values.add_metric([model, *labels, replica], value)
        yield from families


def _read(metric: known.Metric, stats: Mapping[str, int]) -> Iterator[tuple[list[str], float]]:
    if isinstance(metric.read, str):
        yield [], stats.get(metric.read, 0) / metric.per
    else:
        for label, name in metric.read.items():
            yield [label], stats.get(name, 0) / metric.per


class ProcessesCollector(Collector):
    """Memory, processor time, handles and waits of every engine process, and of the host."""

    def __init__(self, models: Iterable[Entry]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        faults, wait = family(known.FAULTS, "replica"), family(known.CPU_WAIT, "replica")
        for model, replica, client in engines_of(self._models):
            if (pid := client.pid) is None:
                continue
            labels = {"model_name": model, "replica": replica}
            process = ProcessCollector("octavo_engine", partial(int, pid), registry=None)
            for metric in process.collect():
                values = families.setdefault(metric.name, metric)
                samples = [s._replace(labels=labels) for s in metric.samples]
                values.samples = samples if values is metric else values.samples + samples
            with suppress(OSError):  # it has ended meanwhile
                faults.add_metric([model, replica], major_faults(PROC / str(pid)))
                wait.add_metric([model, replica], cpu_wait(PROC / str(pid)))
        yield from (*families.values(), faults, wait)
        yield from _workers()
        for host, seconds in ((known.MEMORY_STALL, memory_stall()), (known.THROTTLED, throttled())):
            if seconds is not None:
                told = family(host)
                told.add_metric([], seconds)
                yield told


def _workers() -> Iterator[Metric]:
    """Processor time and memory of the server's other processes, the sums of those of one kind."""
    spent: dict[str, list[float]] = {}
    for worker, process in workers():
        with suppress(OSError):  # it has ended meanwhile
            ticks = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
            pages = (process / "statm").read_text().split()[1]
            both = spent.setdefault(worker, [0.0, 0.0])
            both[0] += sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
            both[1] += int(pages) * os.sysconf("SC_PAGE_SIZE")
    for i, metric in enumerate(known.WORKERS):
        told = family(metric)
        for worker, both in spent.items():
            told.add_metric([worker], both[i])
        yield told


def workers() -> Iterator[tuple[str, Path]]:
    """Children of this process that work for all models, with what they do."""
    for children in of_threads(PROC / "self", "children"):
        for pid in children.split():
            with suppress(OSError):  # it has ended meanwhile
                words = _text(f"{PROC}/{pid}/cmdline").split("\0")
                if (worker := next(filter(None, map(WORKERS.get, words)), None)) is not None:
                    yield worker, PROC / pid


def major_faults(process: Path) -> int:
    """Page faults of a process that waited for the disk. Raises OSError once it has ended."""
    return int((process / "stat").read_text().rpartition(")")[2].split()[9])


def cpu_wait(process: Path) -> float:
    """Seconds that its threads waited for a processor. Raises OSError once it has ended."""
    return sum(int(each.split()[1]) for each in of_threads(process, "schedstat")) / 1e9


def of_threads(process: Path, name: str) -> Iterator[str]:
    """What a file says of each thread of a process. Raises OSError once the process has ended."""
    for thread in os.listdir(f"{process}/task"):
        with suppress(OSError):  # it has ended meanwhile
            yield _text(f"{process}/task/{thread}/{name}")


def _text(path: str) -> str:
    with open(path) as file:  # in a third of the time that Path.read_text takes
        return file.read()


def memory_stall() -> float | None:
    """Seconds in which something on this host waited for memory; None where nobody knows."""
    try:
        text = (PROC / "pressure" / "memory").read_text()
    except OSError:
        return None
    return int(text.partition("\n")[0].rpartition("total=")[2]) / 1e6


def throttled() -> float | None:
    """Seconds for which a limit on processor time stopped this control group, if it has one."""
    try:
        own = (PROC / "self" / "cgroup").read_text().rpartition("::/")[2].strip()
        lines = (CGROUP / own / "cpu.stat").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split() for line in lines)
    return int(fields["throttled_usec"]) / 1e6 if "throttled_usec" in fields else None
