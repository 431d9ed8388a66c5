"""Options that several commands share, and progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

_SIZING = (
    click.option(
        "--memory", metavar="SIZE", envvar="OCTAVO_MEMORY",
        help="Most memory to use: 8GiB, 75%. [80% of what is available]",
    ),
    click.option(
        "--context", type=int, metavar="N", envvar="OCTAVO_CONTEXT",
        help="Most tokens of a conversation. [the model's own, or what fits]",
    ),
    click.option(
        "--threads", type=int, metavar="N", envvar="OCTAVO_THREADS",
        help="CPU threads. [all this process may use]",
    ),
    click.option(
        "--kv-dtype", type=click.Choice(["auto", "bf16", "int8", "f32"]), default="auto",
        envvar="OCTAVO_KV_DTYPE",
        help="Precision of cached keys and values. [bf16; f32 for mixtures of experts]",
    ),
    click.option(
        "--offline", is_flag=True, envvar="OCTAVO_OFFLINE",
        help="Use only models that are already here.",
    ),
)  # fmt: skip


def sizing(command: F) -> F:
    """--memory, --context, --threads, --kv-dtype, --offline."""
    for option in reversed(_SIZING):
        command = option(command)
    return command


def parse_adapters(given: tuple[str, ...]) -> tuple[tuple[str, Path], ...]:
    """NAME=FOLDER pairs. Raises UsageError."""
    from octavo.errors import UsageError

    out = []
    for text in given:
        name, equals, folder = text.partition("=")
        if not equals or not name or not Path(folder).is_dir():
            raise UsageError(
                f"--lora {text!r} is not NAME=FOLDER", "--lora german=./adapters/german"
            )
        out.append((name, Path(folder).resolve()))
    return tuple(out)


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, one line elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        click.echo(f"{what} {total / 1e6:.1f} MB", err=True)
        yield lambda n: None
        return
    columns = (TextColumn(f"{what:<9}"), BarColumn(30), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total)
        yield lambda n: bar.advance(task, n)
