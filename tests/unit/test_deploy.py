"""What is written of the table of metrics: up to date, and as Prometheus reads it.

`promtool` is of Debian's package prometheus, which CI installs.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo.server import metric_table
from octavo.server.alerts import ALERTS, PROCESS
from octavo.server.deploy import DOCUMENTS
from octavo.server.metric_table import TABLE
from octavo.server.window import ScrapeWindow, read

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "alerts.yaml"
M = '{model_name="a"}'
STEPS = 150  # of 30 seconds
UP = f"0+60x{STEPS}"
SAME = f"0x{STEPS}"


def histogram(name: str, above: str, label: str = "model_name") -> dict[str, str]:
    """Everything is between 0.1 and `above`."""
    counts = {"0.1": SAME, "0.25": SAME, above: UP, "+Inf": UP}
    return {f'{name}_bucket{{{label}="a",le="{le}"}}': n for le, n in counts.items()}


def kv(held: int, cached: int, free: int) -> dict[str, str]:
    states = {"held": held, "cached": cached, "free": free}
    return {
        f'octavo_kv_blocks{{model_name="a",state="{s}"}}': f"{n}x{STEPS}" for s, n in states.items()
    }


def requests(**statuses: str) -> dict[str, str]:
    return {
        f'octavo_requests_total{{route="/v1/completions",status="{k[1:]}"}}': v
        for k, v in statuses.items()
    }


ONE, HALF = f"0+1x{STEPS}", f"0+30x{STEPS}"
HEALTHY = {
    **requests(s200=UP, s503=ONE, s500=SAME),
    **histogram("gen_ai_server_time_to_first_token_seconds", "0.25", "gen_ai_request_model"),
    **histogram("octavo_inter_token_seconds", "0.25"),
    **histogram("octavo_request_queue_time_seconds", "0.25"),
    **kv(50, 40, 10),
    f"octavo_prompt_tokens_total{M}": UP, f"octavo_cached_tokens_total{M}": ONE,
    f"octavo_steps_total{M}": UP, f"octavo_requests_running{M}": f"4x{STEPS}",
    f"octavo_requests_waiting{M}": f"1x{STEPS}", f"octavo_generated_tokens_total{M}": f"0+180x{STEPS}",
    f"octavo_preemptions_total{M}": f"0+1x{STEPS}", f"octavo_engine_restarts_total{M}": f"1x{STEPS}",
    'octavo_request_finished_total{model_name="a",finished_reason="stop"}': UP,
    'octavo_request_finished_total{model_name="a",finished_reason="length"}': ONE,
    'octavo_answer_signs_total{model_name="a",sign="empty"}': ONE,
    f"{PROCESS}_resident_memory_bytes{M}": f"1000000000+5000000x{STEPS}",  # as KV blocks are touched
    f"octavo_kv_touched_bytes{M}": f"0+4999000x{STEPS}", f"octavo_image_cache_bytes{M}": SAME,
    f"{PROCESS}_start_time_seconds{M}": f"1700000000x{STEPS}", "process_start_time_seconds": f"1700000000x{STEPS}",
    "process_resident_memory_bytes": f"100000000+1000x{STEPS}", "octavo_build_info": f"1x{STEPS}",
    f"{PROCESS}_cpu_seconds_total{M}": UP, f"octavo_engine_cpu_wait_seconds_total{M}": ONE,
    "octavo_host_memory_stall_seconds_total": f"0+0.1x{STEPS}",
    "octavo_host_cpu_throttled_seconds_total": f"0+0.1x{STEPS}",
    f"octavo_engine_major_faults_total{M}": UP, f"octavo_step_slowdown{M}": f"1.1x{STEPS}",
    f"octavo_speculation_lost_seconds_total{M}": f"0+0.1x{STEPS}",
    f"octavo_engine_busy_seconds_total{M}": f"0+20x{STEPS}",
    'octavo_upstream_state{replica="u",state="down"}': SAME,
    'octavo_upstream_state{replica="u",state="up"}': f"1x{STEPS}",
    'octavo_upstream_breaker_open{replica="u"}': SAME, "octavo_gateway_waiting": SAME,
}  # fmt: skip
# What is different where something is wrong.
FAULTS: dict[str, dict[str, str]] = {
    "OctavoSlowFirstToken": histogram("gen_ai_server_time_to_first_token_seconds", "10.0", "gen_ai_request_model"),
    "OctavoSlowTokens": histogram("octavo_inter_token_seconds", "1.0"),
    "OctavoOverloaded": histogram("octavo_request_queue_time_seconds", "5.0"),
    "OctavoRefusing": {'octavo_refused_requests_total{code="queue_full"}': HALF},
    "OctavoErrors": requests(s500=HALF),
    "OctavoEngineRestarted": {f"octavo_engine_restarts_total{M}": f"1x{STEPS - 10} 2x10"},
    "OctavoEngineStalled": {f"octavo_steps_total{M}": f"0+60x{STEPS - 20} 7800x20"},
    "OctavoCutAnswers": {'octavo_request_finished_total{model_name="a",finished_reason="length"}': f"0+90x{STEPS}"},
    "OctavoBadAnswers": {'octavo_answer_signs_total{model_name="a",sign="empty"}': HALF},
    "OctavoKvFull": kv(85, 10, 5) | {f"octavo_cached_tokens_total{M}": HALF},
    "OctavoSmallBatches": {f"octavo_requests_running{M}": f"40x{STEPS}"},
    "OctavoIdleEngine": {f"octavo_engine_busy_seconds_total{M}": f"0+10x{STEPS}"},
    "OctavoPreempting": {f"octavo_preemptions_total{M}": HALF},
    "OctavoCacheStarved": kv(94, 3, 3) | {f"octavo_requests_waiting{M}": SAME},
    "OctavoMemoryGrows": {f"octavo_kv_touched_bytes{M}": SAME},
    "OctavoServerMemoryGrows": {"process_resident_memory_bytes": f"100000000+5000000x{STEPS}"},
    "OctavoMemoryPressure": {"octavo_host_memory_stall_seconds_total": f"0+9x{STEPS}"},
    "OctavoPageFaults": {f"octavo_engine_major_faults_total{M}": f"0+3000x{STEPS}"},
    "OctavoCpuContended": {f"octavo_engine_cpu_wait_seconds_total{M}": HALF},
    "OctavoCpuThrottled": {"octavo_host_cpu_throttled_seconds_total": f"0+9x{STEPS}"},
    "OctavoSlowSteps": {f"octavo_step_slowdown{M}": f"1.1x{STEPS - 40} 5x40"},
    "OctavoDraftsLose": {f"octavo_speculation_lost_seconds_total{M}": f"0+9x{STEPS}"},
    "OctavoUpstreamDown": {'octavo_upstream_state{replica="u",state="down"}': f"1x{STEPS}"},
    "OctavoNoUpstream": {'octavo_upstream_state{replica="u",state="up"}': SAME},
    "OctavoUpstreamFailing": {'octavo_upstream_breaker_open{replica="u"}': f"1x{STEPS}"},
}  # fmt: skip


OF_ENGINES = {
    m.exposed for m in (*metric_table.ENGINE, *metric_table.PROCESSES) if "model_name" in m.labels
}


def engines(changed: dict[str, str], count: int) -> dict[str, str]:
    """A load on so many engines, of which the last is not healthy."""
    if count == 1:
        return HEALTHY | changed
    found = {}
    for key, values in (HEALTHY | changed).items():
        name, _, labels = key.partition("{")
        if name not in OF_ENGINES:
            found[key] = values
            continue
        for i in range(count):
            one = values if i == count - 1 else HEALTHY[key]
            found[f'{name}{{replica="{i}",{labels}'] = one
    return found


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_is_written_is_up_to_date(document: str) -> None:
    path, written = DOCUMENTS[document]
    assert (ROOT / path).read_text() == written(), f"octavo metrics {document} > {path}"


@pytest.mark.parametrize("count", [1, 2])
def test_rules_raise_for_each_fault_alone_and_for_no_healthy_load(
    tmp_path: Path, count: int
) -> None:
    """Also where one of two engines is at fault."""
    assert set(FAULTS) == {alert.name for alert in ALERTS}
    faults = {"": dict[str, str](), **FAULTS}
    cases = [(name, engines(changed, count)) for name, changed in faults.items()]
    tests = []
    for name, series in cases:
        samples = [{"labels": f'{{alertname="{name}"}}', "value": 1}] if name else []
        query = {
            "expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": "75m",
            "exp_samples": samples,
        }  # fmt: skip
        given = [{"series": key, "values": values} for key, values in series.items()]
        tests.append(
            {"name": name, "interval": "30s", "input_series": given, "promql_expr_test": [query]}
        )
    path = tmp_path / "test.yaml"
    path.write_text(
        json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "5m", "tests": tests})
    )
    promtool("check", "rules", str(RULES))
    promtool("test", "rules", str(path))


def scraped(series: dict[str, str], step: int) -> str:
    """What a server would say at a step: `a+bxn` and `axn`, one after the other."""
    lines = []
    for name, values in series.items():
        at = []
        for part in values.split():
            start, more, count = re.fullmatch(r"([\d.]+)(\+[\d.]+)?x(\d+)", part).groups()  # type: ignore[union-attr]
            at += [float(start) + i * float(more or 0) for i in range(int(count) + 1)]
        lines.append(f"{name} {at[step]}")
    types = {re.sub(r"(_bucket)?\{.*", "", name): name for name in series}
    kinds = [f"# TYPE {n} {'histogram' if '_bucket' in s else 'untyped'}" for n, s in types.items()]
    return "\n".join([k for k in kinds if "histogram" in k] + lines) + "\n"


def raised(series: dict[str, str], first: int) -> set[str]:
    """What two scrapes say of a series, from a step to the last."""
    window = ScrapeWindow(read(scraped(series, first)), read(scraped(series, STEPS)), 30.0 * (STEPS - first))  # fmt: skip
    return {a.name for a in ALERTS if any(v > a.above for v in a.measured(window).values())}


@pytest.mark.parametrize("count", [1, 2])
def test_doctor_finds_the_same_faults_in_two_scrapes(count: int) -> None:
    begins = {"OctavoEngineStalled": STEPS - 15}
    for name, changed in FAULTS.items():
        assert raised(engines(changed, count), begins.get(name, STEPS - 40)) == {name}
    assert raised(engines({}, count), 10) == set()


def test_many_healthy_engines_are_no_fault() -> None:
    """A sum over all of them would be above bounds that are for one."""
    assert raised(engines({}, 32), 10) == set()


def known() -> set[str]:
    """The names that queries may use."""
    of = {"histogram": ("_bucket", "_sum", "_count")}
    return {m.exposed + end for m in TABLE for end in of.get(m.kind, ("",))}


def named(text: str) -> set[str]:
    """What a text has of names like those of metrics, but labels."""
    found = set(re.findall(r"\b(?:octavo|gen_ai|process)_\w+", text))
    return found - {label for metric in TABLE for label in metric.labels}


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    board: Any = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    asked = named(" ".join(t["expr"] for p in board["panels"] for t in p.get("targets", ())))
    shown = {m.exposed for m in TABLE if not m.name.startswith("python") and m.kind != "info"}
    assert asked <= known() and {n.removesuffix("_bucket") for n in asked} == shown
    assert len({p["id"] for p in board["panels"]}) == len(board["panels"])


def test_prometheus_reads_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    """With what Grafana puts in place of its variables."""
    board: Any = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    asked = [t["expr"] for p in board["panels"] for t in p.get("targets", ())]
    told = [e.replace("$__rate_interval", "1m").replace("$model", ".*") for e in asked]
    assert not any("$" in query for query in told)
    rules = [{"record": f"panel:{i}", "expr": query} for i, query in enumerate(told)]
    path = tmp_path / "panels.yaml"
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", str(path))


def test_alerts_ask_for_metrics_that_exist() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        asked = named(rule["expr"])
        assert asked and asked <= known()
        assert rule["annotations"]["mitigation"] and rule["labels"]["severity"]


@pytest.mark.parametrize("path", ["server/ui/dashboard.js", "server/ui/tiles.js", "cli/top.py", "cli/diagnosis.py"])  # fmt: skip
def test_who_looks_at_metrics_asks_for_those_that_exist(path: str) -> None:
    text = (ROOT / "src/octavo" / path).read_text()
    asked = named(text)
    assert asked and asked <= {m.exposed for m in TABLE}
    assert not re.search(r"octavo_\w*[${]", text), "names are whole, so that they are found"
