"""Every metric of a server and of a gateway, once: name, kind, unit, labels and meaning.

`server/metrics.py` and `gateway/metrics.py` fill them, `octavo metrics` writes docs/metrics.md, the
Grafana dashboard and the Prometheus rules of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from octavo.generate.gaps import BOUNDS
from octavo.generate.quality import SIGNS

Kind = Literal["counter", "gauge", "histogram", "info"]
MODEL = ("model_name",)
GEN_AI = ("gen_ai_operation_name", "gen_ai_request_model")
SOURCES = ("forced", "prediction", "lookup", "recent", "draft", "self")  # of drafts
OUTCOMES = ("answered", "refused", "cancelled", "failed")

# The bounds that the conventions advise, and finer ones below: small models take less.
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
         30.0, 60.0)  # fmt: skip
EACH = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0,
        2.5)  # fmt: skip
WHOLE = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKENS = tuple(float(1 << i) for i in range(18))


class Metric(NamedTuple):
    """buckets: of a histogram. read: the field of EngineStats that it is, or the field of each
    value of its second label; per: what that is divided by."""

    name: str  # without the ending that Prometheus gives counters
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    meaning: str
    buckets: tuple[float, ...] = ()
    read: str | Mapping[str, str] = ""
    per: float = 1.0

    @property
    def exposed(self) -> str:
        """The name in a query; a histogram's without `_bucket`, `_sum` and `_count`."""
        return self.name + {"counter": "_total", "info": "_info"}.get(self.kind, "")


def _stats(name: str, kind: Kind, unit: str, meaning: str, read: str, per: float = 1.0) -> Metric:
    return Metric(f"octavo_{name}", kind, unit, MODEL, meaning, (), read, per)


def _drafts(name: str, kind: str, meaning: str) -> Metric:
    read = {source: f"{kind}_{source}" for source in SOURCES}
    return Metric(f"octavo_{name}", "counter", "tokens", (*MODEL, "source"), meaning, (), read)


def _times(name: str, meaning: str) -> Metric:
    return Metric(f"octavo_{name}", "histogram", "seconds", MODEL, meaning, SECONDS)


REQUESTS = (
    Metric("octavo_requests", "counter", "requests", ("route", "status"),
           "Requests by route and status"),
    Metric("octavo_refused_requests", "counter", "requests", ("code",),
           "Requests refused for load or limits (429, 503), by error code"),
    Metric("octavo_replayed_requests", "counter", "requests", (),
           "Requests answered as before, by their idempotency keys"),
    Metric("octavo_request_finished", "counter", "choices", (*MODEL, "finished_reason"),
           "Choices by how they ended: stop, length, tool_calls"),
    Metric("octavo_tokens", "counter", "tokens", (*MODEL, "direction", "outcome"),
           f"Tokens of prompts (input) and answers (output), by how the request ended: "
           f"{', '.join(OUTCOMES)}"),
    Metric("octavo_answer_signs", "counter", "choices", (*MODEL, "sign"),
           f"Choices with a sign of bad quality: {', '.join(SIGNS)}"),
    Metric("octavo_slow_requests", "counter", "requests", (*MODEL, "cause"),
           "Requests far slower than those before them, by what held them up"),
)  # fmt: skip

LATENCY = (
    Metric("gen_ai_server_time_to_first_token_seconds", "histogram", "seconds", GEN_AI,
           "From arrival to the first token: sent, in a stream, else sampled", FIRST),
    Metric("gen_ai_server_time_per_output_token_seconds", "histogram", "seconds", GEN_AI,
           "Mean time of a token after the first, of each request", EACH),
    Metric("gen_ai_server_request_duration_seconds", "histogram", "seconds", GEN_AI,
           "From arrival to the end of the answer, of answered requests", WHOLE),
    Metric("octavo_inter_token_seconds", "histogram", "seconds", MODEL,
           "Every time between two tokens of a choice; those of one step have 0", BOUNDS),
    _times("request_receive_time_seconds",
           "From arrival to the engine: body, limits, template, tokens, grammar, loading"),
    _times("request_queue_time_seconds", "From the engine to the first step: others were before"),
    _times("request_prefill_time_seconds", "From the first step to the first token"),
    _times("request_decode_time_seconds", "From the first token to the last"),
    Metric("octavo_request_prompt_tokens", "histogram", "tokens", MODEL,
           "Tokens of a request's prompts", TOKENS),
    Metric("octavo_request_generation_tokens", "histogram", "tokens", MODEL,
           "Tokens generated for a request", TOKENS),
)  # fmt: skip

ENGINE = (
    _stats("requests_running", "gauge", "requests", "Requests that are computed", "running"),
    _stats("requests_waiting", "gauge", "requests", "Requests that the engine has not begun",
           "waiting"),
    Metric("octavo_kv_blocks", "gauge", "blocks", (*MODEL, "state"),
           "KV blocks: held by running requests, cached for prefixes, free", (),
           {s: f"blocks_{s}" for s in ("free", "cached", "held")}),
    _stats("kv_touched_bytes", "gauge", "bytes", "KV blocks that were ever used", "kv_bytes"),
    _stats("prompt_tokens", "counter", "tokens", "Tokens of prompts submitted", "prompt_tokens"),
    _stats("cached_tokens", "counter", "tokens", "Of these, found in the prefix cache",
           "cached_tokens"),
    _stats("generated_tokens", "counter", "tokens", "Tokens generated", "generated_tokens"),
    _stats("preemptions", "counter", "preemptions", "Times a request lost its blocks to another",
           "preemptions"),
    _stats("steps", "counter", "steps", "Steps computed; tokens / steps is the batch", "steps"),
    _stats("engine_busy_seconds", "counter", "seconds", "Time in steps", "busy_us", 1e6),
    _stats("step_seconds", "gauge", "seconds", "What a step without prompts takes now", "step_us",
           1e6),
    _stats("step_slowdown", "gauge", "times",
           "What steps take now, times what those of as many requests took in the last hours",
           "slowdown_permille", 1e3),
    _stats("prompt_token_seconds", "gauge", "seconds",
           "What a prompt token takes now, with all beside it", "prompt_token_ns", 1e9),
    _drafts("verified_draft_tokens", "drafted", "Tokens of drafts that steps verified, by source"),
    _drafts("accepted_draft_tokens", "accepted", "Of these, accepted"),
    _stats("speculation_lost_seconds", "counter", "seconds",
           "Time lost to looking for drafts and to rejected ones", "speculation_lost_us", 1e6),
    _stats("images_encoded", "counter", "images", "Images encoded", "images_encoded"),
    _stats("image_hits", "counter", "images", "Images whose embeddings were kept from before",
           "image_hits"),
    _stats("image_encode_seconds", "counter", "seconds", "Time in the image encoder", "image_us",
           1e6),
    _stats("image_cache_bytes", "gauge", "bytes", "Embeddings of images that are kept",
           "image_bytes"),
    _stats("grammars_compiled", "counter", "grammars", "Grammars and schemas compiled",
           "grammars_compiled"),
    _stats("grammar_compile_seconds", "counter", "seconds",
           "Time to compile them, beside the steps", "grammar_us", 1e6),
    _stats("engine_restarts", "counter", "restarts", "Engines started again after a crash",
           "restarts"),
)  # fmt: skip

_PROCESS = (
    ("cpu_seconds", "counter", "seconds", "Processor time"),
    ("resident_memory_bytes", "gauge", "bytes", "Resident memory"),
    ("virtual_memory_bytes", "gauge", "bytes", "Address space"),
    ("start_time_seconds", "gauge", "seconds", "Start (since 1970)"),
    ("open_fds", "gauge", "files", "Open files and sockets"),
    ("max_fds", "gauge", "files", "Limit of open files and sockets"),
)  # fmt: skip
FAULTS = Metric("octavo_engine_major_faults", "counter", "faults", MODEL,
                "Page faults of the engine that waited for the disk")  # fmt: skip
CPU_WAIT = Metric("octavo_engine_cpu_wait_seconds", "counter", "seconds", MODEL,
                  "Time that threads of the engine could run and had no processor")  # fmt: skip
MEMORY_STALL = Metric("octavo_host_memory_stall_seconds", "counter", "seconds", (),
                      "Time in which something on this host waited for memory (PSI)")  # fmt: skip
WORKER = ("worker",)  # templates, grammars
WORKERS = (
    Metric("octavo_worker_process_cpu_seconds", "counter", "seconds", WORKER,
           "Processor time of what renders templates, and of what checks grammars"),
    Metric("octavo_worker_process_resident_memory_bytes", "gauge", "bytes", WORKER,
           "Resident memory of these"),
)  # fmt: skip
SPIKES = Metric("octavo_memory_spikes", "counter", "spikes", (*MODEL, "cause"),
                "Times that an engine, or the server (no model), grew far within seconds, by what "
                "took it")  # fmt: skip
THROTTLED = Metric("octavo_host_cpu_throttled_seconds", "counter", "seconds", (),
                   "Time for which the control group's limit stopped the server")  # fmt: skip
BUILD = Metric("octavo_build", "info", "", ("version", "python"), "What is running")
PROCESSES = (
    *(Metric(f"process_{name}", kind, unit, (), f"{text} of the server")  # type: ignore[arg-type]
      for name, kind, unit, text in _PROCESS),
    *(Metric(f"octavo_engine_process_{name}", kind, unit, MODEL,  # type: ignore[arg-type]
             f"{text} of the engine") for name, kind, unit, text in _PROCESS),
    *WORKERS, SPIKES, FAULTS, CPU_WAIT, MEMORY_STALL, THROTTLED, BUILD,
    Metric("python", "info", "", ("implementation", "major", "minor", "patchlevel", "version"),
           "The interpreter"),
    Metric("python_gc_objects_collected", "counter", "objects", ("generation",),
           "Objects that the server's garbage collector found"),
    Metric("python_gc_objects_uncollectable", "counter", "objects", ("generation",),
           "Objects that it could not free"),
    Metric("python_gc_collections", "counter", "collections", ("generation",), "Its runs"),
)  # fmt: skip

UPSTREAM = ("replica",)
UPSTREAMS = (
    Metric("octavo_upstream_state", "gauge", "", (*UPSTREAM, "state"),
           "1 for the state that an upstream is in: starting, up, draining, down"),
    Metric("octavo_upstream_breaker_open", "gauge", "", UPSTREAM,
           "1 from when an upstream has failed too often until a request to it succeeds"),
    Metric("octavo_upstream_requests_running", "gauge", "requests", UPSTREAM,
           "Requests at an upstream that have a first token"),
    Metric("octavo_upstream_requests_waiting", "gauge", "requests", UPSTREAM,
           "Requests at an upstream that have none yet"),
)  # fmt: skip
GATEWAY = (
    *UPSTREAMS,
    Metric("octavo_gateway_waiting", "gauge", "requests", (),
           "Requests that wait for an upstream"),
    Metric("octavo_upstream_requests", "counter", "requests", (*UPSTREAM, "version", "status"),
           "Requests by who answered last, and how"),
    Metric("octavo_upstream_retries", "counter", "requests", (),
           "Requests sent again before their first byte"),
    Metric("octavo_upstream_failovers", "counter", "streams", (),
           "Streams that went on at another upstream"),
    Metric("octavo_upstream_hedges", "counter", "requests", ("won",),
           "Requests that a second upstream got beside a slow one"),
    Metric("octavo_gateway_prepared", "counter", "answers", (),
           "Prepared answers given when no upstream had one"),
    Metric("octavo_response_cache", "counter", "requests", ("result",),
           "Requests whose answers may be kept: hit, miss"),
    Metric("octavo_response_cache_bytes", "gauge", "bytes", (), "Answers that are kept"),
)  # fmt: skip

SECTIONS = {
    "Requests": REQUESTS, "Latency": LATENCY, "Engine": ENGINE, "Processes": PROCESSES,
    "Gateway": GATEWAY,
}  # fmt: skip
TABLE = tuple(metric for section in SECTIONS.values() for metric in section)
METRICS = {metric.name: metric for metric in TABLE}
