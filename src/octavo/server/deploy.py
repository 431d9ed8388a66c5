"""Documents made of the table of metrics and of alerts: docs/metrics.md and what deploy/ has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from octavo.server.alerts import ALERTS, GROUPS, Alert, shorter
from octavo.server.memory_spikes import MEMORY_CAUSES
from octavo.server.metric_table import SECTIONS, Metric
from octavo.server.timelines import CAUSES

INTRO = """# Metrics

`GET /metrics` of a server, in Prometheus' text format; of a gateway too, which has its own in place
of those of engines. This page,
[the dashboard](../deploy/grafana.json) and [the rules](../deploy/alerts.yaml) are written by
`octavo metrics`. Names and labels are bounded: no label has a value that a client chose.
Those of engines have a label `replica` where a model has several: alerts look at each engine,
the dashboard at the sum of all.
Those that begin with `gen_ai` follow the
[conventions of OpenTelemetry](https://github.com/open-telemetry/semantic-conventions-genai), with
finer buckets.
"""


def markdown() -> str:
    """docs/metrics.md."""
    return "\n".join([INTRO, *_tables(), *_causes(), *_alerts()])


def _tables() -> Iterator[str]:
    for title, section in SECTIONS.items():
        yield f"## {title}\n\n| metric | kind | unit | labels | meaning |\n|---|---|---|---|---|"
        for m in section:
            labels = ", ".join(f"`{label}`" for label in m.labels)
            yield f"| `{m.exposed}` | {m.kind} | {m.unit} | {labels} | {m.meaning} |"
        yield ""


def _causes() -> Iterator[str]:
    yield "## Causes\n\nThe `cause` of `octavo_slow_requests_total` and of a time line.\n"
    yield "| cause | what held the request up |\n|---|---|"
    yield from (f"| `{cause}` | {meaning} |" for cause, meaning in CAUSES.items())
    yield "\nThat of `octavo_memory_spikes_total`.\n"
    yield "| cause | when the process grew |\n|---|---|"
    yield from (f"| `{cause}` | {meaning} |" for cause, meaning in MEMORY_CAUSES.items())
    yield ""


def _alerts() -> Iterator[str]:
    yield "## Alerts\n\n| alert | raised above | what to do |\n|---|---|---|"
    for a in ALERTS:
        yield f"| `{a.name}` | {a.said(a.above)}, for {a.wait} ({a.severity}) | {a.mitigation} |"
    yield ""


def rules(faster: int = 1) -> str:
    """Rules for Prometheus, as YAML; all times in them so many times shorter."""
    import yaml

    groups = [
        {"name": f"octavo-{name}", "rules": [_rule(alert, faster) for alert in group]}
        for name, group in GROUPS.items()
    ]
    return str(yaml.safe_dump({"groups": groups}, sort_keys=False, width=110))


def _rule(alert: Alert, faster: int) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expr(faster),
        "for": shorter(alert.wait, faster),
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.meaning.replace("{}", _template(alert)),
            "mitigation": alert.mitigation,
        },
    }


def _template(alert: Alert) -> str:
    """The value, in Prometheus' templates."""
    formats = {"%": "{{ $value | humanizePercentage }}", "s": "{{ $value | humanizeDuration }}"}
    formats |= {"/s": "{{ $value | humanize }} a second", "x": "{{ $value | humanize }} times"}
    formats["MB/h"] = "{{ $value | humanize1024 }}B an hour"
    return formats.get(alert.unit, "{{ $value | humanize }}")


def grafana() -> str:
    """A Grafana dashboard: a row of panels for each section of the table."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, section in SECTIONS.items():
        panels.append(_placed({"type": "row", "title": title, "collapsed": False}, 0, y, 24, 1))
        y += 1
        shown = [m for m in section if m.kind != "info" and not m.name.startswith("python")]
        for i, metric in enumerate(shown):
            panels.append(_placed(_panel(metric), 8 * (i % 3), y + 7 * (i // 3), 8, 7))
        y += 7 * -(-len(shown) // 3)
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    board = {
        "title": "Octavo", "uid": "octavo", "tags": ["octavo"], "schemaVersion": 39, "version": 1,
        "refresh": "10s", "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_source(), _model()]}, "panels": panels,
    }  # fmt: skip
    return json.dumps(board, indent=1) + "\n"


def _placed(panel: dict[str, Any], x: int, y: int, w: int, h: int) -> dict[str, Any]:
    return {**panel, "gridPos": {"x": x, "y": y, "w": w, "h": h}}


def _source() -> dict[str, Any]:
    return {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _model() -> dict[str, Any]:
    query = "label_values(octavo_requests_running, model_name)"
    return {
        "name": "model", "type": "query", "query": query, "multi": True, "includeAll": True,
        "allValue": ".*", "refresh": 2, "datasource": {"type": "prometheus", "uid": "${source}"},
        "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def _panel(metric: Metric) -> dict[str, Any]:
    targets = [
        {"refId": chr(65 + i), "expr": expr, "legendFormat": legend}
        for i, (expr, legend) in enumerate(queries(metric))
    ]
    units = {"seconds": "s", "bytes": "bytes"}
    unit = units.get(metric.unit, "short")
    if metric.kind == "counter":
        unit = "percentunit" if metric.unit == "seconds" else "ops"
    thresholds = [a.above for a in ALERTS if metric.kind == "histogram" and metric.name in a.value]
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    steps += [{"color": "red", "value": above} for above in thresholds]
    custom = {"thresholdsStyle": {"mode": "line" if thresholds else "off"}, "fillOpacity": 8}
    return {
        "type": "timeseries", "title": metric.name, "description": metric.meaning,
        "datasource": {"type": "prometheus", "uid": "${source}"}, "targets": targets,
        "fieldConfig": {
            "defaults": {
                "unit": unit, "min": 0, "custom": custom,
                "thresholds": {"mode": "absolute", "steps": steps},
            },
            "overrides": [],
        },
    }  # fmt: skip


def queries(metric: Metric) -> list[tuple[str, str]]:
    """What a panel shows of a metric, with the legends."""
    of = next((label for label in metric.labels if label.endswith(("model", "model_name"))), None)
    where = f'{{{of}=~"$model"}}' if of else ""
    if metric.kind == "histogram":
        rate = f"sum by (le) (rate({metric.name}_bucket{where}[$__rate_interval]))"
        return [(f"histogram_quantile({q}, {rate})", f"p{100 * q:g}") for q in (0.5, 0.95, 0.99)]
    by = ", ".join(label for label in metric.labels)
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels) or metric.name
    value = f"{metric.exposed}{where}"
    if metric.kind == "counter":
        value = f"rate({value}[$__rate_interval])"
    most = metric.kind == "gauge" and metric.unit == "seconds"  # of several engines: no sum
    of_all = "max" if most else "sum"
    return [(f"{of_all} by ({by}) ({value})" if by else f"{of_all}({value})", legend)]


DOCUMENTS: dict[str, tuple[str, Callable[[], str]]] = {
    "markdown": ("docs/metrics.md", markdown),
    "prometheus": ("deploy/alerts.yaml", rules),
    "grafana": ("deploy/grafana.json", grafana),
}
