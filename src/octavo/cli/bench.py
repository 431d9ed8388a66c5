"""octavo bench."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.group()
def bench() -> None:
    """Measure."""


@bench.command()
@click.argument("model")
@click.option(
    "--batch", default="1,8,32", show_default=True, help="Batch sizes, separated by commas."
)
@click.option("--prompt", default=128, show_default=True, help="Prompt tokens of each request.")
@click.option("--output", default=128, show_default=True, help="Tokens each request generates.")
@click.option("--threads", type=int, help="CPU threads. [all]")
@click.option(
    "--repeats", default=3, show_default=True, help="Runs per batch size; medians are reported."
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the results here.",
)
def engine(
    model: str,
    batch: str,
    prompt: int,
    output: int,
    threads: int | None,
    repeats: int,
    json_file: Path | None,
) -> None:
    """Prefill and decode speed of MODEL, without HTTP."""
    from octavo.bench.engine import bench_engine
    from octavo.checkpoint.hub import locate
    from octavo.errors import UsageError

    try:
        batches = [int(b) for b in batch.split(",")]
    except ValueError:
        batches = []
    if not batches or min(batches) < 1 or min(prompt, output, repeats) < 1:
        raise UsageError(
            "--batch takes numbers separated by commas; all counts start at 1", "--batch 1,8,32"
        )
    located = locate(model)
    result = bench_engine(located.path, located.name, batches, prompt, output, threads, repeats)
    click.echo("batch  prompt  output  prefill tok/s  decode tok/s   ttft ms   rss MB")
    for r in result["runs"]:
        click.echo(
            f"{r['batch']:>5}{r['prompt']:>8}{r['output']:>8}{r['prefill_tps']:>15.1f}"
            f"{r['decode_tps']:>14.1f}{r['ttft_ms']:>10.1f}{r['rss_mb']:>9.1f}"
        )
    if json_file:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
