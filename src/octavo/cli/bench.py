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
    click.echo("batch  prompt  output  prefill tok/s  decode tok/s   ttft ms  overhead %   rss MB")
    for r in result["runs"]:
        click.echo(
            f"{r['batch']:>5}{r['prompt']:>8}{r['output']:>8}{r['prefill_tps']:>15.1f}"
            f"{r['decode_tps']:>14.1f}{r['ttft_ms']:>10.1f}{r['overhead']:>12.1f}{r['rss_mb']:>9.1f}"
        )
        click.echo(f"       {_phases(r['phases'])}")
        if r["expert_mb"]:
            click.echo(f"       {r['expert_mb']:.1f} MB of experts' weights read a step")
    if json_file:
        json_file.write_text(json.dumps(result, indent=1) + "\n")


def _phases(phases: dict[str, float]) -> str:
    """The largest shares of a decode step, in percent."""
    largest = sorted(phases.items(), key=lambda item: -item[1])[:6]
    return "decode step: " + ", ".join(f"{name} {share:.0f} %" for name, share in largest)


@bench.command()
@click.argument("model")
@click.option("--threads", type=int, help="CPU threads. [all]")
@click.option("--repeats", default=5, show_default=True, help="Rounds in which all take turns.")
@click.option("--offline", is_flag=True)
def decoding(model: str, threads: int | None, repeats: int, offline: bool) -> None:
    """What grammars, log-probabilities, adapters and beams add to a step of MODEL."""
    from octavo.bench.decoding import bench_decoding
    from octavo.checkpoint.hub import locate

    located = locate(model, offline=offline)
    for c in bench_decoding(located.path, located.name, threads, repeats, click.echo):
        more = "" if c.percent is None else f"{c.percent:+8.1f} %"
        if c.least:
            more += f" (reading the adapters alone: {c.least:.0f} %)"
        click.echo(f"{c.name:<28}{c.step_ms:>8.2f} ms a step{more}")


@bench.command()
@click.option("--isa", help="Instruction set. [the best of this host]")
@click.option("--threads", type=int, help="CPU threads. [all]")
@click.option(
    "--formats", help="Stored formats, separated by commas, like Q4_1,BF16. [all]", metavar="LIST"
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the results here.",
)
@click.option(
    "--svg",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also draw a roofline here.",
)
def kernels(
    isa: str | None,
    threads: int | None,
    formats: str | None,
    json_file: Path | None,
    svg: Path | None,
) -> None:
    """Speed of each kernel, beside what this host can do at most."""
    from dataclasses import asdict

    from octavo import _native
    from octavo.bench.kernels import bench_kernels, measure_limits
    from octavo.bench.roofline import roofline
    from octavo.checkpoint.base import PACKED
    from octavo.engine.plan import usable_threads
    from octavo.errors import UsageError

    isas = _native.isas()
    if isa is not None and isa not in isas:
        raise UsageError(f"--isa {isa}: this host runs {', '.join(isas)}", f"--isa {isas[0]}")
    wanted = {f.strip().upper() for f in formats.split(",")} if formats else None
    if wanted and (unknown := wanted - {k.name for k in PACKED}):
        raise UsageError(
            f"--formats {', '.join(sorted(unknown))}; there are {', '.join(k.name for k in PACKED)}"
        )
    limits = measure_limits(isa or isas[0], threads or usable_threads())
    click.echo(
        f"{limits.isa}, {limits.threads} threads: memory {limits.read_gbs:.1f} GB/s, byte products "
        f"{limits.registers_gops:,.0f} GOPS in registers, {limits.widest_gops:,.0f} at most"
    )
    click.echo("kernel          shape            tokens        us      GB/s      GOPS  % of limit")
    times = []
    for t in bench_kernels(limits, tuple(k for k in PACKED if not wanted or k.name in wanted)):
        times.append(t)
        share = f"{t.percent:>10.0f}" if t.percent else " " * 9 + "-"
        click.echo(
            f"{t.kernel:<16}{t.shape:<16}{t.tokens:>7}{t.microseconds:>10.1f}{t.gbs:>10.1f}"
            f"{t.gops:>10.1f}  {share}"
        )
    if json_file:
        record = {"limits": asdict(limits), "kernels": [asdict(t) for t in times]}
        json_file.write_text(json.dumps(record, indent=1) + "\n")
    if svg:
        svg.write_text(roofline(limits, times))


@bench.command()
@click.argument("model", default="smollm2")
@click.option("--repeats", type=int, default=3, show_default=True)
@click.option("--threads", type=int, metavar="N", help="CPU threads. [all this process may use]")
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the results here.",
)
def load(model: str, repeats: int, threads: int | None, json_file: Path | None) -> None:
    """How long MODEL takes to load, beside copying its files from the page cache."""
    from dataclasses import asdict

    from octavo.bench.load import bench_load
    from octavo.checkpoint.hub import locate
    from octavo.errors import UsageError

    if repeats < 1 or (threads is not None and threads < 1):
        raise UsageError("--repeats and --threads start at 1")
    t = bench_load(locate(model).path, repeats, threads)
    for name, seconds in (
        ("files to one buffer", t.buffer_seconds),
        ("files to new memory", t.memory_seconds),
        ("load", t.load_seconds),
        ("packing after that", t.settle_seconds),
        ("load packed", t.packed_seconds),
    ):
        rate = f"{t.nbytes / seconds / 1e9:>8.2f} GB/s" if seconds > 0.001 else ""
        click.echo(f"{name:<20}{seconds:>8.3f} s{rate}")
    click.echo(f"peak {t.peak / 2**20:,.0f} MiB, {t.peak / t.planned:.2f} of what was planned")
    if json_file:
        json_file.write_text(json.dumps(asdict(t), indent=1) + "\n")
