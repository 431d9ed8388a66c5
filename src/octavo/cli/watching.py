"""Options of `octavo serve` that say what is told of requests, and to whom."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.options import together

if TYPE_CHECKING:
    from octavo.server.exchange import Watcher


@dataclass(frozen=True)
class Watching:
    """log: of requests; content: with what was said. otlp: a collector of traces."""

    log: Path | None
    content: bool
    otlp: str | None

    def open(self) -> list[Watcher]:
        """Opens what was asked for. Raises UsageError."""
        from octavo.errors import UsageError

        found: list[Watcher] = []
        if self.log is not None:
            from octavo.server.request_log import RequestLog

            found.append(RequestLog(self.log, self.content))
        elif self.content:
            raise UsageError("--log-content writes to a file; name it", "--log-requests FILE")
        if self.otlp is not None:
            from octavo.server.traces import open_traces

            found.append(open_traces(self.otlp))
        return found


_options = together(
    click.option(
        "--log-requests",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        envvar="OCTAVO_LOG_REQUESTS",
        help="Append a line of JSON for each request: sizes, times, how it ended.",
    ),
    click.option("--log-content", is_flag=True, help="Write prompts and answers to that file too."),
    click.option(
        "--otlp",
        metavar="URL",
        envvar="OCTAVO_OTLP",
        help="Send traces to this OpenTelemetry collector: http://127.0.0.1:4318.",
    ),
)


def watching_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options, as the parameter `watching`."""

    @functools.wraps(command)
    def watched(
        log_requests: Path | None, log_content: bool, otlp: str | None, **given: Any
    ) -> Any:
        return command(watching=Watching(log_requests, log_content, otlp), **given)

    return _options(watched)
