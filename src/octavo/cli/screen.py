"""Output of commands: text without control characters, tables and progress bars."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from octavo.errors import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPED_WIDTH = 10_000  # where no terminal folds lines, a row is one line


def say(text: object = "", *, end: str = "\n", err: bool = False, dim: bool = False) -> None:
    """Prints text, which may come from a file, a model or a client, and flushes it."""
    clean = printable(str(text))
    click.echo((click.style(clean, dim=True) if dim else clean) + end, nl=False, err=err)


def size(nbytes: int) -> str:
    """A number of bytes for people."""
    return f"{nbytes / 1e6:,.1f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:,.1f} kB"


def utc(at: float) -> str:
    """Seconds since 1970, as a date."""
    from datetime import UTC, datetime

    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def say_json(value: Any) -> None:
    """Prints a value as JSON, indented, in ASCII."""
    import json

    say(json.dumps(value, indent=2))


def grid(
    rows: Iterable[tuple[object, ...]], columns: tuple[str, ...] = (), right: tuple[int, ...] = ()
) -> Table:
    """Rows in columns; `right`: columns to align there."""
    from rich.table import Table
    from rich.text import Text

    made = Table(
        box=None, pad_edge=False, show_header=bool(columns), header_style="", padding=(0, 2, 0, 0)
    )
    cells = [[Text(printable(str(cell))) for cell in row] for row in rows]
    for i, name in enumerate(columns or [""] * max(map(len, cells), default=0)):
        if i in right:
            made.add_column(name, justify="right", no_wrap=True)
        else:
            made.add_column(name, overflow="fold")
    for row in cells:
        made.add_row(*row)
    return made


def table(
    rows: Iterable[tuple[object, ...]], columns: tuple[str, ...] = (), right: tuple[int, ...] = ()
) -> None:
    """Prints a `grid`, folded to the terminal."""
    console = _console()
    with console.capture() as captured:
        console.print(grid(rows, columns, right))
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def _console() -> Console:
    from rich.console import Console

    return Console(
        width=None if sys.stdout.isatty() else PIPED_WIDTH, markup=False, highlight=False,
        emoji=False,
    )  # fmt: skip


@contextmanager
def step_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar of steps, with the time they will take, on a terminal; elsewhere nothing."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = [TextColumn(what, markup=False), BarColumn(20), MofNCompleteColumn()]
    console = Console(stderr=True)
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda n: bar.advance(task, n)


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal; elsewhere one line."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        say(f"{what} {total / 1e6:.1f} MB", err=True)
        yield lambda n: None
        return
    columns = [TextColumn(what, markup=False), BarColumn(20), DownloadColumn()]
    if console.width >= 72:
        columns += [TransferSpeedColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total)
        yield lambda n: bar.advance(task, n)
        bar.update(task, completed=total)  # what is packed later, or not at all, is done too
