"""octavo quantize --budget: the mix of types that loses least within a number of bytes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from octavo.cli.numbers import Number, count
from octavo.cli.options import together
from octavo.cli.screen import say, say_json, size, step_bar, table

if TYPE_CHECKING:
    from octavo.checkpoint import Checkpoint
    from octavo.compress.search import FoundMix, Point

budget_options = together(
    click.option(
        "--budget", metavar="SIZE",
        help="Instead of --recipe: the mix of types that loses least within these bytes.",
    ),
    click.option(
        "--context", type=count(),
        help="The budget holds the KV cache of so many tokens, too.",
    ),
    click.option(
        "--concurrency", type=count(), help="Sequences of that context. [1]"
    ),
    click.option(
        "--max-kl", type=Number(0), help="Most that the model may lose, nats a token."
    ),
    click.option(
        "--chart", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
        help="Also write the measured mixes here, as SVG.",
    ),
)  # fmt: skip


def search_mix(
    checkpoint: Checkpoint, output: Path, data: Path | None, as_json: bool, *, typed: str,
    budget: str, context: int | None, concurrency: int | None, max_kl: float | None,
    chart: Path | None,
) -> None:  # fmt: skip
    """Finds and writes the mix, and explains it on one screen. typed: how the model was named."""
    from octavo.checkpoint.places import check_report
    from octavo.checkpoint.writer import replacing
    from octavo.compress.frontier_chart import chart as drawn
    from octavo.compress.search import Budget, search
    from octavo.engine.host import available_memory
    from octavo.engine.plan import parse_size
    from octavo.errors import UsageError

    if concurrency is not None and context is None:
        raise UsageError("--concurrency needs --context", "--context 4096")
    check_report(chart)
    nbytes = parse_size(budget, available_memory(), "--budget")
    wanted = Budget(nbytes, context or 0, concurrency or 1, max_kl)
    found = search(checkpoint, wanted, output, data=data, progress=step_bar)
    if chart is not None:
        with replacing(chart) as file:
            file.write(drawn(found))
    if as_json:
        say_json(asdict(found) | {"output": str(found.output)})
    else:
        _explain(found, checkpoint.path.name, typed)


def _explain(found: FoundMix, name: str, typed: str) -> None:
    def row(p: Point) -> tuple[object, ...]:
        kinds = ", ".join(f"{n} {kind}" for kind, n in p.kinds.items())
        chosen = "<" if p == found.chosen else ""
        return f"{p.nbytes / 1e6:,.1f}", f"{p.predicted:.4g}", f"{p.kl:.4g}", kinds, chosen

    say(f"Each matrix of {name} was measured alone on a grid of 4 bits, these mixes whole:")
    say()
    columns = ("MB", "KL predicted", "KL measured", "matrices", "")
    table(map(row, found.frontier), columns, right=(0, 1, 2))
    say()
    if found.cache:
        say(f"The KV cache takes {size(found.cache)} of the budget.")
    taken = size(found.output.stat().st_size)
    say(f"{found.output} takes {taken}, with a KL of {found.chosen.kl:.4g} from {name}")
    say(f"try: octavo evaluate {found.output} --against {typed}")
