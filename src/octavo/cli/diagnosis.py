"""What is wrong with a server, of its metrics, its last requests and this machine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from octavo.cli.remote import Remote
from octavo.server.alerts import ALERTS
from octavo.server.timelines import CAUSES
from octavo.server.window import ScrapeWindow

FEW = 0.05  # of the last requests, which may be slow by chance


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, and what to do."""

    name: str
    severity: str
    model: str  # or one of its engines, "m/0"; "": the whole server
    meaning: str
    mitigation: str


def look(server: Remote, seconds: int) -> ScrapeWindow:
    """What a server's metrics say: of the next `seconds`, or with 0 since its start."""
    first = server.metrics()
    if seconds:
        looks = []
        for _ in range(seconds):
            time.sleep(1)
            looks.append(server.metrics())
        return ScrapeWindow(first, looks[-1], seconds, tuple(looks[:-1]))
    started = ScrapeWindow({}, first, 1).last("process_start_time_seconds").get("", time.time())
    return ScrapeWindow({}, first, max(time.time() - started, 1.0))


def findings(window: ScrapeWindow) -> list[Finding]:
    """What is beyond the bounds of the alerts."""
    return [
        Finding(alert.name, alert.severity, model, alert.said(value), alert.mitigation)
        for alert in ALERTS
        for model, value in sorted(alert.measured(window).items())
        if value > alert.above
    ]


def lately(server: Remote) -> Iterator[Finding]:
    """What the last requests that were slow were held up by, and what grew for no known reason."""
    lines = server.json("/v1/requests")
    yield from _spikes(lines["spikes"])
    causes = Counter((line["model"], line["cause"]) for line in lines["recent"] if line["cause"])
    for (model, cause), count in causes.most_common():
        if count <= FEW * len(lines["recent"]):
            return
        text = f"{count} of the last {len(lines['recent'])} requests were slow: {CAUSES[cause]}"
        listed = [*lines["worst"], *lines["recent"]]
        worst = next(w["id"] for w in listed if (w["model"], w["cause"]) == (model, cause))
        yield Finding(
            "slow_requests", "warning", model, text, f"see {server.url}/v1/requests/{worst}"
        )


def _spikes(spikes: list[dict[str, Any]]) -> Iterator[Finding]:
    """Processes that grew far within seconds, of nothing that takes memory as it should."""
    for one in spikes:
        if one["cause"] == "unknown":
            who = "the engine" if one["model"] else "the server"
            grown = f"{who} grew by {one['bytes'] / 1e6:.0f} MB within {one['seconds']:.0f} s"
            ran = ", ".join(one["requests"]) or "nothing"
            todo = f"see what ran ({ran}) in /v1/requests; send octavo doctor's report"
            yield Finding("memory_spike", "warning", one["model"], grown, todo)


def upstreams(server: Remote, window: ScrapeWindow) -> Iterator[Finding]:
    """Which upstreams get no requests, and why, if the server is a gateway."""
    if not window.last("octavo_gateway_waiting", ""):
        return
    for one in server.json("/v1/upstreams")["upstreams"]:
        if one["state"] in ("down", "starting"):
            text = one["reason"] or f"upstream {one['id']} has not answered yet"
            todo = f"octavo doctor --server {one['url']}; POST /v1/upstreams/remove forgets it"
            yield Finding("upstream_down", "critical", "", text, todo)
        elif one["breaker"] != "closed":
            text = f"upstream {one['id']} gets next to nothing: requests to it failed"
            todo = f"octavo doctor --server {one['url']}, and its log"
            yield Finding("upstream_failing", "critical", "", text, todo)


def threads(url: str) -> Iterator[Finding]:
    """Whether a server of this machine was given more threads than it has processors."""
    from octavo.cli.ps import options_of, running
    from octavo.engine.host import usable_threads

    for one in running():
        wanted = options_of(one.pid).get("threads") if one.url == url else None
        if wanted is not None and wanted > usable_threads():
            text = f"{wanted} threads on {usable_threads()} processors wait for each other"
            yield Finding("threads", "warning", "", text, f"--threads {usable_threads()}")
