"""What can go wrong, how metrics show it, and what to do: for Prometheus and `octavo doctor`.

Queries keep the labels `job` and `instance`: an alert is about one server, which the others that
the same Prometheus scrapes neither hide nor accuse.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from octavo.server.window import ENGINE, ScrapeWindow, Values, share, total

PROCESS = "octavo_engine_process"
CPU_WAIT = "octavo_engine_cpu_wait_seconds_total"
FELT = 0.05  # seconds a second that threads wait, below which nobody notices
FIRST, GAPS = "gen_ai_server_time_to_first_token_seconds", "octavo_inter_token_seconds"
QUEUE = "octavo_request_queue_time_seconds"
REQUESTS, FINISHED = "octavo_requests_total", "octavo_request_finished_total"
PROMPT, CACHED = "octavo_prompt_tokens_total", "octavo_cached_tokens_total"
GENERATED, STEPS = "octavo_generated_tokens_total", "octavo_steps_total"
PREEMPTIONS = "octavo_preemptions_total"
BUSY = "octavo_engine_busy_seconds_total"
RUNNING, WAITING = "octavo_requests_running", "octavo_requests_waiting"
REFUSED = "octavo_refused_requests_total"
LINE, STATE = "octavo_gateway_waiting", "octavo_upstream_state"  # of gateways
BROKEN = '{status=~"5..",status!="503"}'
CUT = '{finished_reason="length"}'
# The share of an engine's KV blocks that no request holds.
ROOM = (
    'sum without (state) (avg_over_time(octavo_kv_blocks{state=~"free|cached"}[5m])) / '
    "sum without (state) (octavo_kv_blocks)"
)
LITTLE = 0.25  # of the blocks
# Memory that an engine is meant to take as it is used.
MEANT = ("octavo_kv_touched_bytes", "octavo_image_cache_bytes")
SERVER = "job, instance"  # labels that Prometheus gives
HOUR = 3600
TIMES = re.compile(rf"\b(\d+m|{HOUR})\b")  # in a query: [5m], offset 35m, * 3600


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

    def expr(self, faster: int = 1) -> str:
        """The query of the rule, with times so many times shorter."""
        return f"({TIMES.sub(lambda m: shorter(m[0], faster), self.value)}) > {self.above:g}"

    def said(self, value: float) -> str:
        """The meaning, with the value."""
        number = {
            "%": f"{100 * value:.0f} %", "MB/h": f"{value / 1e6:.0f} MB an hour",
            "s": f"{value:.2f} s", "/s": f"{value:.2f} a second", "x": f"{value:.1f} times",
        }.get(self.unit, f"{value:g}")  # fmt: skip
        return self.meaning.replace("{}", number)


def shorter(time: str, times: int) -> str:
    """Minutes, or a number of seconds, so many times shorter: 5m, 60 -> 5s."""
    if times == 1:
        return time
    return f"{60 * int(time[:-1]) // times}s" if time[-1] == "m" else str(int(time) // times)


def _p95(name: str, by: str) -> str:
    return f"histogram_quantile(0.95, sum by (le, {SERVER}, {by}) (rate({name}_bucket[5m])))"


def _by(name: str, where: str = "") -> str:
    return f"sum by ({SERVER}, model_name) (rate({name}{where}[5m]))"


def _all(name: str, where: str = "") -> str:
    return f"sum by ({SERVER}) (rate({name}{where}[5m]))"


def _grows(process: str, *meant: str) -> str:
    """By how much memory grows in an hour, of a process that has been there for longer than is
    looked at: one that starts grows."""
    grown = " - ".join(
        f"deriv({name}[30m])" for name in (f"{process}_resident_memory_bytes", *meant)
    )
    started = f"{process}_start_time_seconds"
    return f"({grown}) * {HOUR} and {started} == {started} offset 35m"


def _errors(w: ScrapeWindow) -> Values:
    statuses = w.increase(REQUESTS, "status")
    failed = sum(v for k, v in statuses.items() if k.startswith("5") and k != "503")
    return share(total([failed]), total(statuses.values()))


def _refused(w: ScrapeWindow) -> Values:
    return share(w.increase(REFUSED, ""), w.increase(REQUESTS, ""))


def _room(w: ScrapeWindow) -> Values:
    """The share of an engine's blocks that no request holds."""
    name = "octavo_kv_blocks"
    return share(w.mean(name, ENGINE, state=("free", "cached")), w.mean(name, ENGINE))


def _full(w: ScrapeWindow) -> Values:
    waiting = w.mean(WAITING, ENGINE)
    return {e: 1 - room for e, room in _room(w).items() if waiting.get(e, 0) >= 1}


def _starved(w: ScrapeWindow) -> Values:
    found, room = share(w.increase(CACHED, ENGINE), w.increase(PROMPT, ENGINE)), _room(w)
    return {engine: 1 - hits for engine, hits in found.items() if room.get(engine, 1) < LITTLE}


def _small(w: ScrapeWindow) -> Values:
    batch = share(w.increase(GENERATED, ENGINE), w.increase(STEPS, ENGINE))
    return share(w.last(RUNNING, ENGINE), batch)


def _contended(w: ScrapeWindow) -> Values:
    felt = {e: n for e, n in w.rate(CPU_WAIT).items() if n > FELT}
    found = share(felt, w.rate(f"{PROCESS}_cpu_seconds_total"))
    return {e: n for e, n in found.items() if n}


def _idle(w: ScrapeWindow) -> Values:
    busy = w.rate(BUSY, ENGINE)
    waiting = w.last(WAITING, ENGINE)
    steps = w.increase(STEPS, ENGINE)  # with none it is stalled
    return {e: n for e, n in waiting.items() if busy.get(e, 0.0) < 0.5 and steps.get(e)}


def _stalled(w: ScrapeWindow) -> Values:
    if not w.before:
        return {}  # only two looks can tell
    steps, waiting = w.increase(STEPS, ENGINE), w.last(WAITING, ENGINE)
    running = w.last(RUNNING, ENGINE)
    return {e: n + waiting.get(e, 0) for e, n in running.items() if not steps.get(e)}


def _growth(w: ScrapeWindow, process: str, *meant: str) -> Values:
    if w.seconds < 60:
        return {}  # too short to tell a leak from a request
    then = ScrapeWindow({}, w.before, 1)
    started = f"{process}_start_time_seconds"
    before, now = then.last(started, ENGINE), w.last(started, ENGINE)
    lived = {e for e, start in now.items() if before.get(e) == start}
    grown = dict.fromkeys(lived, 0.0)
    for name, sign in ((f"{process}_resident_memory_bytes", 1), *((m, -1) for m in meant)):
        first, last = then.last(name, ENGINE), w.last(name, ENGINE)
        for e in lived:
            grown[e] += sign * (last.get(e, 0.0) - first.get(e, 0.0))
    return {e: v / w.seconds * 3600 for e, v in grown.items()}


def _slower(w: ScrapeWindow) -> Values:
    steps = w.increase(STEPS, ENGINE)
    return {e: n for e, n in w.last("octavo_step_slowdown", ENGINE).items() if steps.get(e)}


def _nobody(w: ScrapeWindow) -> Values:
    up = w.last(STATE, "", state=("up",))
    return {gateway: float(not up.get(gateway)) for gateway in w.last(LINE, "")}


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
          f"sum by ({SERVER}, model_name) (increase(octavo_engine_restarts_total[15m]))",
          0, "0m", "",
          "The engine was started again {} times",
          "The log says what it died of; killed (9) is the kernel's, for memory: lower --memory or "
          "--context",
          lambda w: w.increase("octavo_engine_restarts_total")),
    Alert("OctavoEngineStalled", "critical",
          f"{RUNNING} + {WAITING} unless rate({STEPS}[2m]) > 0", 0, "2m", "",
          "{} requests run or wait, and no step was computed",
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
          f"(1 - {ROOM}) and avg_over_time({WAITING}[5m]) >= 1",
          1 - LITTLE, "5m", "%", "Running requests hold {} of the KV blocks, and others wait",
          "More memory (--memory), --kv-dtype int8, a shorter --context, or fewer requests at a "
          "time",
          _full),
    Alert("OctavoSmallBatches", "warning",
          f"{RUNNING} / (rate({GENERATED}[5m]) / rate({STEPS}[5m]))",
          8, "5m", "x", "There are {} as many requests as a step computes tokens for",
          "Prompts keep tokens waiting, or grammars do: see octavo_step_seconds and "
          "octavo_grammar_compile_seconds_total; shorter prompts, or fewer at a time",
          _small),
    Alert("OctavoIdleEngine", "warning",
          f"{WAITING} and rate({STEPS}[5m]) > 0 unless rate({BUSY}[5m]) > 0.5",
          0, "5m", "", "{} requests wait while the engine computes less than half of the time",
          "They wait for KV blocks, images or grammars, not for the processor: more memory "
          "(--memory), or see what /v1/requests says they are at",
          _idle),
    Alert("OctavoPreempting", "warning", f"rate({PREEMPTIONS}[5m])", 0.1, "5m", "/s",
          "Requests lose their blocks to others {}",
          "More memory for KV blocks (--memory, --kv-dtype int8), or fewer requests at a time",
          lambda w: w.rate(PREEMPTIONS, ENGINE)),
    Alert("OctavoCacheStarved", "warning",
          f"(1 - rate({CACHED}[5m]) / rate({PROMPT}[5m])) and ({ROOM} < {LITTLE})",
          0.9, "10m", "%", "{} of the tokens of prompts are not in the prefix cache: it is small",
          "Running requests leave prefixes no room: more memory (--memory, --kv-dtype int8), or "
          "fewer requests at a time",
          _starved),
    Alert("OctavoMemoryGrows", "warning", _grows(PROCESS, *MEANT), 256e6, "10m", "MB/h",
          "The engine grows by {}, beside KV blocks and images that it keeps",
          "What it keeps is bounded by --memory and not counted; growth beyond that is a leak: "
          "send octavo doctor's report",
          lambda w: _growth(w, PROCESS, *MEANT)),
    Alert("OctavoServerMemoryGrows", "warning",
          f"({_grows('process')}) and on ({SERVER}) octavo_build_info", 256e6, "10m", "MB/h",
          "The server, without its engines, grows by {}",
          "A leak, unless ever more requests are in flight: send octavo doctor's report",
          lambda w: _growth(w, "process")),
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
          f"({_by(CPU_WAIT)} > {FELT}) / {_by(PROCESS + '_cpu_seconds_total')}",
          0.2, "5m", "s",
          "Threads of the engine wait {} for a processor for each second that they have one",
          "Other processes use the cores: move them, or give the server fewer --threads than there "
          "are cores free",
          _contended),
    Alert("OctavoCpuThrottled", "warning", "rate(octavo_host_cpu_throttled_seconds_total[5m])",
          0.05, "5m", "%", "The control group's limit stopped the server for {} of the time",
          "Raise the container's limit on processors, or set --threads to it",
          lambda w: w.rate("octavo_host_cpu_throttled_seconds_total")),
    Alert("OctavoSlowSteps", "warning",
          f"octavo_step_slowdown and rate({STEPS}[5m]) > 0",
          2, "10m", "x", "A step takes {} what one of as many requests usually took",
          "Much longer texts explain a part. Else the processor is slower: shared with others "
          "where OctavoCpuContended says so, hot or throttled; octavo bench kernels compares",
          _slower),
    Alert("OctavoDraftsLose", "warning",
          f"{_by('octavo_speculation_lost_seconds_total')} / "
          f"{_by(BUSY)}",
          0.1, "15m", "%",
          "{} of the engine's time is lost to looking for drafts and to rejected ones",
          "octavo tune finds what pays; --speculation off ends it",
          lambda w: share(w.increase("octavo_speculation_lost_seconds_total"),
                          w.increase(BUSY))),
)  # fmt: skip
GATEWAY = (
    Alert("OctavoUpstreamDown", "critical",
          f'sum by ({SERVER}) ({STATE}{{state="down"}})', 0, "2m", "",
          "{} upstreams of the gateway do not answer",
          "octavo doctor --server URL says which, and why, and so does GET /v1/upstreams",
          lambda w: w.last(STATE, "", state=("down",))),
    Alert("OctavoNoUpstream", "critical",
          f'{LINE} * 0 + 1 unless on ({SERVER}) sum by ({SERVER}) ({STATE}{{state="up"}}) > 0',
          0, "1m", "", "No upstream of the gateway is up: requests wait for one, then get 503",
          "GET /v1/upstreams says why of each; if there is none, POST /v1/upstreams or --upstream "
          "URL names one",
          _nobody),
    Alert("OctavoUpstreamFailing", "critical",
          f"sum by ({SERVER}) (octavo_upstream_breaker_open)", 0, "2m", "",
          "{} upstreams of the gateway get next to nothing, because requests to them failed",
          "See octavo_upstream_requests_total by replica and status, and the log of the server: "
          "octavo doctor takes its address, too",
          lambda w: w.last("octavo_upstream_breaker_open", "")),
)  # fmt: skip
GROUPS = {"latency": LATENCY, "failure": FAILURE, "resources": RESOURCES, "gateway": GATEWAY}
ALERTS = tuple(alert for group in GROUPS.values() for alert in group)
