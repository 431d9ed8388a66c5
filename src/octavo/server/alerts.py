"""What can go wrong, how metrics show it, and what to do: for Prometheus and `octavo doctor`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from octavo.server.window import ENGINE, ScrapeWindow, Values, share, total

PROCESS = "octavo_engine_process"
FIRST, GAPS = "gen_ai_server_time_to_first_token_seconds", "octavo_inter_token_seconds"
QUEUE = "octavo_request_queue_time_seconds"
REQUESTS, FINISHED = "octavo_requests_total", "octavo_request_finished_total"
PROMPT, CACHED = "octavo_prompt_tokens_total", "octavo_cached_tokens_total"
GENERATED, STEPS = "octavo_generated_tokens_total", "octavo_steps_total"
RUNNING = "octavo_requests_running"
REFUSED = "octavo_refused_requests_total"
BROKEN = '{status=~"5..",status!="503"}'
SPARE = ("free", "cached")  # KV blocks that no request holds
CUT = '{finished_reason="length"}'
KV = "sum without (state) (octavo_kv_blocks)"  # of each engine


@dataclass(frozen=True)
class Alert:
    """value: a query, which is above `above` where it is wrong, for so long (`wait`). measured: the
    same of two scrapes. meaning: with {} for the value, which is told in `unit`."""

    name: str
    severity: Literal["critical", "warning"]
    value: str
    above: float
    wait: str
    unit: Literal["s", "%", "/s", "MB/h", "x", ""]
    meaning: str
    mitigation: str
    measured: Callable[[ScrapeWindow], Values]

    @property
    def expr(self) -> str:
        return f"({self.value}) > {self.above:g}"

    def said(self, value: float) -> str:
        """The meaning, with the value."""
        number = {
            "%": f"{100 * value:.0f} %", "MB/h": f"{value / 1e6:.0f} MB an hour",
            "s": f"{value:.2f} s", "/s": f"{value:.2f} a second", "x": f"{value:.1f} times",
        }.get(self.unit, f"{value:g}")  # fmt: skip
        return self.meaning.replace("{}", number)


def _p95(name: str, by: str) -> str:
    return f"histogram_quantile(0.95, sum by (le, {by}) (rate({name}_bucket[5m])))"


def _by(name: str, where: str = "") -> str:
    return f"sum by (model_name) (rate({name}{where}[5m]))"


def _all(name: str, where: str = "") -> str:
    return f"sum(rate({name}{where}[5m]))"


def _errors(w: ScrapeWindow) -> Values:
    statuses = w.increase(REQUESTS, "status")
    failed = sum(v for k, v in statuses.items() if k.startswith("5") and k != "503")
    return share(total([failed]), total(statuses.values()))


def _refused(w: ScrapeWindow) -> Values:
    return share(w.increase(REFUSED, ""), w.increase(REQUESTS, ""))


def _kv(w: ScrapeWindow, *states: str) -> Values:
    """The share of an engine's blocks that are so."""
    name = "octavo_kv_blocks"
    return share(w.last(name, ENGINE, state=states), w.last(name, ENGINE))


def _starved(w: ScrapeWindow) -> Values:
    found, room = share(w.increase(CACHED, ENGINE), w.increase(PROMPT, ENGINE)), _kv(w, *SPARE)
    return {engine: 1 - hits for engine, hits in found.items() if room.get(engine, 1) < 0.1}


def _small(w: ScrapeWindow) -> Values:
    batch = share(w.increase(GENERATED, ENGINE), w.increase(STEPS, ENGINE))
    return share(w.last(RUNNING, ENGINE), batch)


def _idle(w: ScrapeWindow) -> Values:
    busy = w.rate("octavo_engine_busy_seconds_total", ENGINE)
    waiting = w.last("octavo_requests_waiting", ENGINE)
    return {engine: n for engine, n in waiting.items() if busy.get(engine, 0.0) < 0.5}


def _stalled(w: ScrapeWindow) -> Values:
    if not w.before:
        return {}  # only two looks can tell
    steps = w.increase(STEPS, ENGINE)
    return {engine: n for engine, n in w.last(RUNNING, ENGINE).items() if not steps.get(engine)}


def _growth(w: ScrapeWindow) -> Values:
    name = f"{PROCESS}_resident_memory_bytes"
    before = ScrapeWindow({}, w.before, 1).last(name, ENGINE)
    if w.seconds < 60:
        return {}  # too short to tell a leak from a request
    now = w.last(name, ENGINE)
    return {e: (v - before[e]) / w.seconds * 3600 for e, v in now.items() if e in before}


LATENCY = (
    Alert("OctavoSlowFirstToken", "warning", _p95(FIRST, "gen_ai_request_model"), 5, "5m", "s",
          "95 % of first tokens come within {}",
          "Look at what it consists of (receive, queue, prefill) in /v1/requests: more replicas "
          "against a queue, a common start of prompts, or shorter ones, against prefill",
          lambda w: w.quantile(0.95, FIRST, "gen_ai_request_model")),
    Alert("OctavoSlowTokens", "warning", _p95(GAPS, "model_name"), 0.5, "5m", "s",
          "95 % of tokens follow the one before within {}",
          "Compare octavo_step_seconds with octavo bench on this machine; where prompts of others "
          "hold tokens up, give clients x-slo-ttft-ms or a smaller --max-queue-tokens; else take a "
          "smaller quantization",
          lambda w: w.quantile(0.95, GAPS)),
    Alert("OctavoOverloaded", "warning", _p95(QUEUE, "model_name"), 2, "5m", "s",
          "Requests wait up to {} (95 %) before the engine begins with them",
          "Add a replica, limit keys (octavo key create --requests-per-minute), or lower "
          "--max-queue so that clients are told at once",
          lambda w: w.quantile(0.95, QUEUE)),
    Alert("OctavoRefusing", "warning",
          f"{_all(REFUSED)} / {_all(REQUESTS)}",
          0.05, "5m", "%", "{} of the requests are refused for load or limits",
          "See octavo_refused_requests_total by code: queue_full wants capacity or a larger "
          "--max-queue, rate_limited is a key at its limit",
          _refused),
)  # fmt: skip
FAILURE = (
    Alert("OctavoErrors", "critical",
          f"{_all(REQUESTS, BROKEN)} / {_all(REQUESTS)}",
          0.01, "5m", "%", "{} of the requests fail",
          "The log names the place of each; send it with octavo doctor's report",
          _errors),
    Alert("OctavoEngineRestarted", "critical",
          "sum by (model_name) (increase(octavo_engine_restarts_total[15m]))", 0, "0m", "",
          "The engine was started again {} times",
          "The log says what it died of; killed (9) is the kernel's, for memory: lower --memory or "
          "--context",
          lambda w: w.increase("octavo_engine_restarts_total")),
    Alert("OctavoEngineStalled", "critical",
          f"{RUNNING} unless rate({STEPS}[2m]) > 0", 0, "2m", "",
          "{} requests run, and no step was computed",
          "The server replaces an engine that is stuck after 300 s; look at the processor time of "
          "the engine: none means that it waits for the disk or was stopped",
          _stalled),
    Alert("OctavoCutAnswers", "warning",
          f"{_by(FINISHED, CUT)} / {_by(FINISHED)}",
          0.5, "15m", "%", "{} of the answers are cut at max_tokens or at the context",
          "Raise max_tokens in clients, or --context",
          lambda w: share(w.increase(FINISHED, finished_reason=("length",)),
                          w.increase(FINISHED))),
    Alert("OctavoBadAnswers", "warning",
          f"{_by('octavo_answer_signs_total')} / {_by(FINISHED)}",
          0.1, "15m", "%", "{} of the answers are empty, repeat themselves or are broken JSON",
          "Check the chat template and sampling parameters (repetition_penalty, temperature); "
          "octavo evaluate compares a quantized model with its original",
          lambda w: share(w.increase("octavo_answer_signs_total"),
                          w.increase(FINISHED))),
)  # fmt: skip
RESOURCES = (
    Alert("OctavoKvFull", "warning",
          f'sum without (state) (octavo_kv_blocks{{state="held"}}) / {KV}',
          0.95, "5m", "%", "Running requests hold {} of the KV blocks",
          "More memory (--memory), --kv-dtype int8, a shorter --context, or fewer requests at a "
          "time",
          lambda w: _kv(w, "held")),
    Alert("OctavoSmallBatches", "warning",
          f"{RUNNING} / (rate({GENERATED}[5m]) / rate({STEPS}[5m]))",
          8, "5m", "x", "There are {} as many requests as a step computes tokens for",
          "Prompts keep tokens waiting, or grammars do: see octavo_step_seconds and "
          "octavo_grammar_compile_seconds_total; shorter prompts, or fewer at a time",
          _small),
    Alert("OctavoIdleEngine", "warning",
          "octavo_requests_waiting unless rate(octavo_engine_busy_seconds_total[5m]) > 0.5",
          0, "5m", "", "{} requests wait while the engine computes less than half of the time",
          "They wait for KV blocks, images or grammars, not for the processor: more memory "
          "(--memory), or see what /v1/requests says they are at",
          _idle),
    Alert("OctavoPreempting", "warning", "rate(octavo_preemptions_total[5m])", 0.1, "5m", "/s",
          "Requests lose their blocks to others {}",
          "More memory for KV blocks (--memory, --kv-dtype int8), or fewer requests at a time",
          lambda w: w.rate("octavo_preemptions_total", ENGINE)),
    Alert("OctavoCacheStarved", "warning",
          f"(1 - rate({CACHED}[5m]) / rate({PROMPT}[5m])) and "
          f'(sum without (state) (octavo_kv_blocks{{state=~"{"|".join(SPARE)}"}}) / {KV} < 0.1)',
          0.9, "15m", "%", "{} of the tokens of prompts are not in the prefix cache: it is small",
          "Running requests leave prefixes no room: more memory (--memory, --kv-dtype int8), or "
          "fewer requests at a time",
          _starved),
    Alert("OctavoMemoryGrows", "warning",
          f"deriv({PROCESS}_resident_memory_bytes[30m]) * 3600", 256e6, "30m", "MB/h",
          "The engine grows by {}",
          "Its KV blocks and caches are bounded by --memory and touched as they are used; growth "
          "beyond that is a leak: send octavo doctor's report",
          _growth),
    Alert("OctavoMemoryPressure", "critical", "rate(octavo_host_memory_stall_seconds_total[5m])",
          0.1, "5m", "%", "{} of the time something on the host waited for memory",
          "Weights are read from disk again and again: lower --memory or free some; the rest of "
          "the machine has too little",
          lambda w: w.rate("octavo_host_memory_stall_seconds_total")),
    Alert("OctavoPageFaults", "warning", "rate(octavo_engine_major_faults_total[5m])", 20, "5m",
          "/s", "The engine waits for pages from the disk {}",
          "The weights do not fit beside everything else: a smaller quantization, less --memory "
          "for KV blocks, or no --packed-cache",
          lambda w: w.rate("octavo_engine_major_faults_total", ENGINE)),
    Alert("OctavoCpuContended", "warning",
          f"{_by('octavo_engine_cpu_wait_seconds_total')} / "
          f"{_by(PROCESS + '_cpu_seconds_total')}",
          0.2, "5m", "s",
          "Threads of the engine wait {} for a processor for each second that they have one",
          "Other processes use the cores: move them, or give the server fewer --threads than there "
          "are cores free",
          lambda w: share(w.increase("octavo_engine_cpu_wait_seconds_total"),
                          w.increase(f"{PROCESS}_cpu_seconds_total"))),
    Alert("OctavoCpuThrottled", "warning", "rate(octavo_host_cpu_throttled_seconds_total[5m])",
          0.05, "5m", "%", "The control group's limit stopped the server for {} of the time",
          "Raise the container's limit on processors, or set --threads to it",
          lambda w: w.rate("octavo_host_cpu_throttled_seconds_total")),
    Alert("OctavoSlowSteps", "warning",
          "octavo_step_seconds / (avg_over_time(octavo_step_seconds[1h] offset 10m) > 0)",
          2, "10m", "x", "A step takes {} what it took an hour ago",
          "More requests at a time explain a part; else the processor is slower: throttled, hot, "
          "or shared",
          lambda w: share(w.last("octavo_step_seconds", ENGINE),
                          ScrapeWindow({}, w.before, 1).last("octavo_step_seconds", ENGINE))),
    Alert("OctavoDraftsLose", "warning",
          f"{_by('octavo_speculation_lost_seconds_total')} / "
          f"{_by('octavo_engine_busy_seconds_total')}",
          0.1, "15m", "%", "Rejected drafts take {} of the engine's time",
          "octavo tune finds what pays; --speculation off ends it",
          lambda w: share(w.increase("octavo_speculation_lost_seconds_total"),
                          w.increase("octavo_engine_busy_seconds_total"))),
)  # fmt: skip
GROUPS = {"latency": LATENCY, "failure": FAILURE, "resources": RESOURCES}
ALERTS = tuple(alert for group in GROUPS.values() for alert in group)
