"""octavo batch."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

from octavo.cli.options import sizing
from octavo.cli.screen import progress_bar, say

if TYPE_CHECKING:
    from octavo.generate.model import ServedModel
    from octavo.server.batch import Line

FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument(
    "source", metavar="IN", type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.argument("target", metavar="OUT", type=FILE)
@click.option(
    "--model", metavar="MODEL", default="smollm2", show_default=True, help="What answers."
)
@sizing
def batch(
    source: Path, target: Path, model: str, memory: str | None, context: int | None,
    threads: int | None, kv_dtype: str, activations: str, mmproj: str,
    vision_dtype: str, device: str, offline: bool,
) -> None:  # fmt: skip
    """Answer the requests in IN, a JSON object a line, as OpenAI's batches have them.

    {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

    Results go to OUT as they are done, errors too. Run again, it goes on with what OUT lacks.
    """
    from octavo.errors import UsageError
    from octavo.generate.load import load
    from octavo.server.app import endpoints
    from octavo.server.batch import Fault, finished_ids, read_lines
    from octavo.server.dialects import DIALECTS

    if source.exists() and target.exists() and source.samefile(target):
        raise UsageError(f"{target} is the input too")
    lines: list[Line] = []
    for line in read_lines(source, endpoints(DIALECTS)):
        if isinstance(line, Fault):
            raise UsageError(f"{source}, line {line.line}: {line.message}")
        lines.append(line)
    known = finished_ids(target)
    left = [line for line in lines if line.custom_id not in known]
    if not left:
        return say(f"{len(lines)} requests, all answered in {target}")
    served = load(
        model, memory=memory, context=context, threads=threads, kv_dtype=kv_dtype,
        activations=activations, mmproj=mmproj, vision_dtype=vision_dtype, device=device,
        offline=offline, loading=progress_bar,
    )  # fmt: skip
    failed = asyncio.run(_run(served, left, target))
    say(f"{len(lines)} requests, {len(left)} answered now, {failed} of them with an error")


async def _run(served: ServedModel, left: list[Line], target: Path) -> int:
    """Writes results behind those that there are. Returns how many of them are errors."""
    from octavo.generate.progress import progress_bar as counting
    from octavo.server.app import create_app
    from octavo.server.batch import run_lines
    from octavo.server.guard import Access, Principal
    from octavo.server.loopback import Loopback
    from octavo.server.metrics import Metrics
    from octavo.server.registry import Registry
    from octavo.server.store import Store

    models, loopback, store, failed = Registry(), Loopback(), Store(), 0
    models.add(served.name, served.client, served.aliases).model = served
    create_app(
        models, Metrics(models), Access(), lambda one: None, store=store, loopback=loopback
    )  # fmt: skip
    sender = Principal()
    try:
        with target.open("ab") as file, counting(None, len(left)) as advance:

            def write(line: bytes, good: bool) -> None:
                nonlocal failed
                file.write(line)
                file.flush()
                failed += not good
                advance()

            await run_lines(left, lambda p, body: loopback.whole(p, body, sender), write)
    finally:
        await served.close()
        store.close()
    return failed
