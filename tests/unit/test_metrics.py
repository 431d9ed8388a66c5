"""What is counted of requests and read of engines, for any number of models."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, cast

from prometheus_client.parser import text_string_to_metric_families

from octavo.cli.top import _models
from octavo.client.base import EngineClient
from octavo.client.process import EngineProcessClient
from octavo.client.replicas import Replicas
from octavo.gateway.admission import UpstreamQueue, WaitLimits
from octavo.gateway.events import Finished
from octavo.gateway.metrics import GatewayMetrics
from octavo.gateway.response_cache import ResponseCache
from octavo.gateway.upstream import Place
from octavo.gateway.upstreams import Upstreams
from octavo.generate.reply import Usage
from octavo.server.exchange import Exchange
from octavo.server.metric_table import GATEWAY, MEMORY_STALL, TABLE, THROTTLED, WORKERS, Metric
from octavo.server.metrics import Metrics
from octavo.server.registry import Registry
from octavo.server.window import ENGINE, ScrapeWindow, read


class Client:
    """Only what metrics look at."""

    def __init__(self, pid: int | None, **stats: int) -> None:
        self.pid = pid
        self.stats = stats
        self.adapters: list[str] = []
        self.overseer: Any = None
        self.ready = True


def samples(metrics: Metrics) -> dict[tuple[Any, ...], float]:
    """Values by name and labels, in the order of the labels' names."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        (s.name, *(v for _, v in sorted(s.labels.items()))): s.value
        for f in families
        for s in f.samples
    }


def test_engines() -> None:
    models = Registry()
    stats = {"running": 2, "waiting": 1, "blocks": 10, "blocks_free": 3, "blocks_cached": 4}
    stats |= {"steps": 7, "generated_tokens": 9, "restarts": 1}
    models.add("a", cast(EngineClient, Client(os.getpid(), **stats)))
    models.add("b", cast(EngineClient, Client(None)))  # which is starting
    metrics = Metrics(models)
    found = samples(metrics)
    assert [found["octavo_requests_running", m] for m in "ab"] == [2, 0]
    assert [found["octavo_requests_waiting", m] for m in "ab"] == [1, 0]
    assert [found["octavo_kv_blocks", "a", s] for s in ("free", "cached", "held")] == [3, 4, 3]
    assert found["octavo_steps_total", "a"] == 7 and found["octavo_steps_total", "b"] == 0
    assert found["octavo_generated_tokens_total", "a"] == 9
    assert found["octavo_engine_restarts_total", "a"] == 1
    memory = "octavo_engine_process_resident_memory_bytes"
    assert found[memory, "a"] > 1 << 20 and (memory, "b") not in found
    models.remove("a")
    assert ("octavo_steps_total", "a") not in samples(metrics)


def test_two_engine_processes_keep_their_labels() -> None:
    models = Registry()
    models.add("a", cast(EngineClient, Client(os.getpid())))
    models.add("b", cast(EngineClient, Client(os.getppid())))
    found = samples(Metrics(models))
    memory = "octavo_engine_process_resident_memory_bytes"
    assert found[memory, "a"] != found[memory, "b"]
    assert (
        found["octavo_engine_process_start_time_seconds", "a"]
        >= (found["octavo_engine_process_start_time_seconds", "b"])
    )


def test_each_engine_of_a_model_has_its_own() -> None:
    """The label `replica`; whoever leaves it out has the sum."""
    clients = [Client(os.getpid(), running=2, steps=7), Client(os.getppid(), running=3, steps=1)]
    models = Registry()
    models.add("a", Replicas([cast(EngineProcessClient, one) for one in clients]))
    models.add("b", cast(EngineClient, Client(None, running=5)))
    text = Metrics(models).render().decode()
    assert 'octavo_requests_running{model_name="a",replica="0"} 2.0' in text
    window = ScrapeWindow({}, read(text), 1)
    assert window.last("octavo_requests_running", ENGINE) == {"a/0": 2, "a/1": 3, "b": 5}
    assert window.last("octavo_requests_running") == {"a": 5, "b": 5}
    idle = read(text.replace('replica="1"} 3.0', 'replica="1"} 0.0'))
    looks = ScrapeWindow({}, read(text), 3, between=(idle, idle))
    assert looks.mean("octavo_requests_running", ENGINE) == {"a/0": 2, "a/1": 1, "b": 5}
    memory = window.last("octavo_engine_process_resident_memory_bytes", ENGINE)
    assert set(memory) == {"a/0", "a/1"} and memory["a/0"] != memory["a/1"]
    shown = {row[0]: row[1:] for row in _models(window)}
    assert shown["a"][0] == "5" and shown["b"][0] == "5"


def finished(**fields: Any) -> Exchange:
    one = Exchange("/v1/completions", "POST", 200, model="a", operation="chat", began=10.0)
    one.ended = 13.0
    for name, value in fields.items():
        setattr(one, name, value)
    return one


def test_requests() -> None:
    metrics = Metrics(Registry())
    usage = Usage(
        prompt=5,
        completion=3,
        began=10.0,
        submitted=10.5,
        admitted=10.75,
        first=11.0,
        last=12.0,
        finishes=["stop"],
    )
    for now, before in ((11.0, 0.0), (11.25, 11.0), (12.0, 11.25)):
        usage.gaps.token(now, before)
    metrics.finished(finished(usage=usage))
    metrics.finished(finished(usage=Usage(prompt=7)))  # as embeddings have it
    other = Metrics(Registry())
    other.finished(finished(usage=Usage(completion=1, first=11.0, last=11.0)))  # waited nowhere
    assert samples(other)["gen_ai_server_time_to_first_token_seconds_count", "chat", "a"] == 1
    metrics.finished(finished(status=404, model=None))
    metrics.finished(finished(status=499, usage=Usage(prompt=9)))
    found = samples(metrics)
    requests = {k[2]: v for k, v in found.items() if k[0] == "octavo_requests_total"}
    assert requests == {"200": 2, "404": 1, "499": 1}
    assert found["octavo_request_finished_total", "stop", "a"] == 1
    sums = {
        "request_prompt_tokens": (2, 12), "request_generation_tokens": (1, 3),
        "request_receive_time_seconds": (1, 0.5), "request_queue_time_seconds": (1, 0.25),
        "request_prefill_time_seconds": (1, 0.25), "request_decode_time_seconds": (1, 1.0),
        "inter_token_seconds": (2, 1.0),
    }  # fmt: skip
    for name, (count, total) in sums.items():
        assert found[f"octavo_{name}_count", "a"] == count
        assert found[f"octavo_{name}_sum", "a"] == total
    sums = {
        "request_duration_seconds": (2, 6.0), "time_to_first_token_seconds": (1, 1.0),
        "time_per_output_token_seconds": (1, 0.5),
    }  # fmt: skip
    for name, (count, total) in sums.items():
        assert found[f"gen_ai_server_{name}_count", "chat", "a"] == count
        assert found[f"gen_ai_server_{name}_sum", "chat", "a"] == total
    tokens = {k[1:]: v for k, v in found.items() if k[0] == "octavo_tokens_total"}
    assert tokens == {
        ("input", "a", "answered"): 12, ("output", "a", "answered"): 3,
        ("input", "a", "cancelled"): 9, ("output", "a", "cancelled"): 0,
    }  # fmt: skip
    buckets = {k[1]: v for k, v in found.items() if k[0] == "octavo_inter_token_seconds_bucket"}
    assert (buckets["0.25"], buckets["0.5"], buckets["1.0"], buckets["+Inf"]) == (1, 1, 2, 2)


def test_every_metric_is_in_the_table_with_its_labels() -> None:
    models = Registry()
    models.add("a", cast(EngineClient, Client(os.getpid(), blocks=1)))
    metrics = Metrics(models)
    usage = Usage(
        prompt=5, completion=3, began=10.0, submitted=10.5, admitted=10.75, first=11.0, last=12.0,
        finishes=["stop"], signs=["empty"],
    )  # fmt: skip
    usage.gaps.token(11.0, 10.5)
    metrics.finished(finished(usage=usage))
    metrics.finished(finished(status=503, code="overloaded", model=None))
    metrics.slow("a", "queue")
    metrics.spiked("a", "kv_cache")
    of_hosts = {m.name for m in (MEMORY_STALL, THROTTLED, *WORKERS)}  # where there are such
    there = told_as_in_the_table(metrics, [m for m in TABLE if m not in GATEWAY])
    assert there | of_hosts == {m.name for m in TABLE if m not in GATEWAY}


def test_every_metric_of_a_gateway_is_in_the_table_with_its_labels() -> None:
    upstreams = Upstreams()
    upstreams.add(Place("http://a:1"))
    metrics = GatewayMetrics(upstreams, UpstreamQueue(upstreams, WaitLimits()))
    metrics.watch(ResponseCache())
    one = Finished("m", "canary", "a:1", "", 200, None, 1.0, 0.5, 0.01, 5, 3, retries=1, failovers=2, hedges=1)  # fmt: skip
    metrics.relayed(one)
    assert told_as_in_the_table(metrics, GATEWAY) == {m.name for m in GATEWAY}
    found = samples(metrics)
    assert found["octavo_upstream_requests_total", "a:1", "200", "canary"] == 1
    assert found["octavo_upstream_failovers_total",] == 2
    assert found["octavo_upstream_hedges_total", "no"] == 1


def told_as_in_the_table(metrics: Metrics, table: Iterable[Metric]) -> set[str]:
    """The names in this part of the table that are told, each with its labels and kind."""
    families = text_string_to_metric_families(metrics.render().decode())
    found = {f.name: f for f in families if f.samples}
    there = [m for m in table if m.exposed.removesuffix("_total") in found]
    for metric in there:
        one = found[metric.exposed.removesuffix("_total")]
        labels = {label for s in one.samples for label in s.labels} - {"le"}
        kind = metric.kind.replace("info", "gauge")
        assert (labels, one.type) == (set(metric.labels), kind), metric.name
    assert set(found) <= {m.exposed.removesuffix("_total") for m in TABLE}
    return {m.name for m in there}
