"""octavo top."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.numbers import count
from octavo.cli.remote import find_server, server_options
from octavo.cli.screen import grid, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from octavo.server.window import ScrapeWindow, Series, Values

ROWS = 12  # of requests
SPAN = 10  # scrapes that rates are of
MODEL_COLUMNS = (
    "model", "running", "waiting", "tok/s", "prompt tok/s", "TTFT", "ITL", "KV held", "cached",
    "hits", "CPU", "memory",
)  # fmt: skip
NUMBERS = tuple(range(1, len(MODEL_COLUMNS)))
REQUEST_COLUMNS = ("request", "model", "phase", "seconds", "prompt", "tokens", "slow because of")


@dataclass(frozen=True)
class View:
    """What is shown: rows of models, of requests that run, and of the worst that have ended."""

    models: list[tuple[str, ...]]
    requests: list[tuple[str, ...]]


@click.command()
@click.option(
    "--interval",
    type=count(1, 3600),
    default=1,
    show_default=True,
    metavar="SECONDS",
    help="Time between looks.",
)
@click.option("--once", is_flag=True, help="Print one look, and end.")
@server_options
def top(server: str | None, interval: int, once: bool, admin_key: str | None) -> None:
    """Watch a server: tokens, queue, memory, requests."""
    from octavo.server.window import ScrapeWindow

    remote = find_server(server, admin_key)
    looks: list[tuple[float, Series]] = [(time.monotonic(), remote.metrics())]

    def view() -> View:
        time.sleep(interval)
        looks.append((time.monotonic(), remote.metrics()))
        del looks[:-SPAN]
        (began, before), (ended, after) = looks[0], looks[-1]
        window = ScrapeWindow(before, after, ended - began)
        return View(_models(window), _requests(remote.json("/v1/requests")))

    if once or not sys.stdout.isatty():
        shown = view()
        table(shown.models, MODEL_COLUMNS, NUMBERS)
        table(shown.requests, REQUEST_COLUMNS, (3, 4, 5))
        return
    _live(view)


def _live(view: Callable[[], View]) -> None:
    """Shows views until Ctrl-C, on the terminal's other screen."""
    from rich.console import Group
    from rich.live import Live

    def drawn() -> RenderableType:
        shown = view()
        models = grid(shown.models, MODEL_COLUMNS, NUMBERS)
        return Group(models, "", grid(shown.requests, REQUEST_COLUMNS, (3, 4, 5)))

    with Live(drawn(), screen=True, auto_refresh=False) as live:
        while True:
            live.update(drawn(), refresh=True)


def _models(w: ScrapeWindow) -> list[tuple[str, ...]]:
    """A row for each model."""
    running, waiting = w.last("octavo_requests_running"), w.last("octavo_requests_waiting")
    tokens, prompts = w.rate("octavo_generated_tokens_total"), w.rate("octavo_prompt_tokens_total")
    first = w.quantile(0.5, "gen_ai_server_time_to_first_token_seconds", "gen_ai_request_model")
    gaps = w.quantile(0.5, "octavo_inter_token_seconds")
    blocks = w.last("octavo_kv_blocks")
    held, cached = (w.last("octavo_kv_blocks", state=(s,)) for s in ("held", "cached"))
    hits = w.rate("octavo_cached_tokens_total")
    cpu = w.rate("octavo_engine_process_cpu_seconds_total")
    memory = w.last("octavo_engine_process_resident_memory_bytes")
    return [
        (
            model, f"{n:.0f}", f"{waiting.get(model, 0):.0f}", f"{tokens.get(model, 0):.1f}",
            f"{prompts.get(model, 0):.1f}", _ms(first, model), _ms(gaps, model),
            _percent(held, blocks, model), _percent(cached, blocks, model),
            _percent(hits, prompts, model), f"{100 * cpu.get(model, 0):.0f} %",
            f"{memory.get(model, 0) / 1e6:,.0f} MB",
        )
        for model, n in sorted(running.items())
    ]  # fmt: skip


def _ms(values: Values, model: str) -> str:
    return f"{1000 * values[model]:.1f} ms" if model in values else "-"


def _percent(part: Values, whole: Values, model: str) -> str:
    return f"{100 * part.get(model, 0) / whole[model]:.0f} %" if whole.get(model) else "-"


def _requests(listed: Any) -> list[tuple[str, ...]]:
    """Rows of those that run, the oldest first, then of the worst that have ended."""
    rows: list[tuple[str, ...]] = [
        (r["id"], r["model"] or "", r["phase"], f"{r['seconds']:.1f}", str(r["prompt_tokens"]),
         str(r["completion_tokens"]), "")
        for r in sorted(listed["running"], key=lambda r: -r["seconds"])
    ]  # fmt: skip
    rows += [
        (r["id"], r["model"], "ended", f"{r['seconds']:.1f}", str(r["prompt_tokens"]),
         str(r["completion_tokens"]), r["cause"])
        for r in listed["worst"]
    ]  # fmt: skip
    return rows[:ROWS]
