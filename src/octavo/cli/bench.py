"""octavo bench."""

from __future__ import annotations

import json
import math
from pathlib import Path

import click

from octavo.cli.numbers import count
from octavo.cli.options import (
    activations_option,
    draft_option,
    kv_dtype_option,
    model_argument,
    offline_option,
    speculation_option,
    threads_option,
)
from octavo.cli.screen import say, table


@click.group()
def bench() -> None:
    """Measure speed on this machine: engine, kernels, loading, drafts, grammars."""


@bench.command()
@model_argument()
@click.option(
    "--batch",
    metavar="LIST",
    default="1,8,32",
    show_default=True,
    help="Batch sizes, separated by commas.",
)
@click.option(
    "--prompt", type=count(), default=128, show_default=True, help="Prompt tokens of each request."
)
@click.option(
    "--output", type=count(), default=128, show_default=True, help="Tokens each request generates."
)
@threads_option
@click.option(
    "--repeats",
    type=count(),
    default=3,
    show_default=True,
    help="Runs per batch size; medians are reported.",
)
@kv_dtype_option
@activations_option
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
    kv_dtype: str,
    activations: str,
    json_file: Path | None,
) -> None:
    """Prefill and decode speed of MODEL, without HTTP."""
    from dataclasses import asdict

    from octavo.bench.engine import bench_engine
    from octavo.checkpoint.hub import locate
    from octavo.errors import UsageError

    try:
        batches = [int(b) for b in batch.split(",")]
    except ValueError:
        batches = []
    if not batches or min(batches) < 1:
        raise UsageError("--batch takes numbers from 1, separated by commas", "--batch 1,8,32")
    located = locate(model)
    report = bench_engine(
        located.path, located.name, batches, prompt, output, threads, repeats, kv_dtype,
        activations,
    )  # fmt: skip
    on = report.machine
    say(
        f"{on['isa']}, {on['threads']} threads, activations {report.activations}, "
        f"KV cache {report.kv_dtype}"
    )
    table(
        [
            (
                r.batch, r.prompt, r.output, f"{r.prefill_tps:.1f}",
                f"{r.decode_tps:.1f}", f"{r.ttft_ms:.1f}", f"{r.overhead:.1f}",
                f"{r.rss_mb:.1f}",
            )
            for r in report.runs
        ],
        (
            "batch", "prompt", "output", "prefill tok/s", "decode tok/s", "ttft ms", "overhead %",
            "rss MB",
        ),
        right=tuple(range(8)),
    )  # fmt: skip
    for r in report.runs:
        say(f"batch {r.batch}: {_phases(r.phases)}")
        if r.expert_mb:
            say(f"batch {r.batch}: {r.expert_mb:.1f} MB of experts' weights read a step")
    if json_file:
        json_file.write_text(json.dumps(asdict(report), indent=1) + "\n")


def _phases(phases: dict[str, float]) -> str:
    """The largest shares of a decode step, in percent."""
    largest = sorted(phases.items(), key=lambda item: -item[1])[:6]
    return "decode step: " + ", ".join(f"{name} {share:.0f} %" for name, share in largest)


@bench.command()
@model_argument()
@threads_option
@click.option(
    "--repeats", type=count(), default=5, show_default=True, help="Rounds in which all take turns."
)
@offline_option
def decoding(model: str, threads: int | None, repeats: int, offline: bool) -> None:
    """What grammars, log-probabilities, adapters and beams add to a step of MODEL."""
    from octavo.bench.decoding import bench_decoding
    from octavo.checkpoint.hub import locate

    located = locate(model, offline=offline)
    rows = []
    for c in bench_decoding(located.path, located.name, threads, repeats, say):
        more = "" if c.percent is None else f"{c.percent:+.1f} %"
        least = f"reading the adapters alone: {c.least:.0f} %" if c.least else ""
        rows.append((c.name, f"{c.step_ms:.2f} ms a step", more, least))
    table(rows, right=(1, 2))


@bench.command()
@model_argument()
@threads_option
@click.option(
    "--repeats", type=count(), default=5, show_default=True, help="Rounds in which both take turns."
)
@click.option("--cases", metavar="LIST", help="Kinds of text, separated by commas. [all]")
@speculation_option
@draft_option
@click.option(
    "--svg", type=click.Path(dir_okay=False, path_type=Path), help="Also draw when drafts pay here."
)
@offline_option
def speculation(
    model: str, threads: int | None, repeats: int, cases: str | None, speculation: str,
    draft: str | None, svg: Path | None, offline: bool,
) -> None:  # fmt: skip
    """How much faster MODEL writes with speculative decoding, by kind of text."""
    from octavo.bench.speculation import CASES, Saving, bench_speculation
    from octavo.bench.speculation_chart import chart
    from octavo.checkpoint.hub import locate
    from octavo.errors import UsageError

    def gained(s: Saving) -> str:
        return f"{s.writing:.3f}" + ("" if math.isnan(s.error) else f" ± {s.error:.3f}")

    known = {c.name: c for c in CASES}
    wanted = cases.split(",") if cases else list(known)
    if not known.keys() >= set(wanted):
        raise UsageError(f"--cases takes {', '.join(sorted(known))}", "--cases copy,chat")
    located = locate(model, offline=offline)
    small = locate(draft, offline=offline).path if draft else None
    savings, times = bench_speculation(
        located.path, located.name, threads, repeats, [known[name] for name in wanted], speculation,
        small,
    )  # fmt: skip
    rows = [
        (
            s.name, f"{s.tps[0]:.0f}", f"{s.tps[1]:.0f}", gained(s),
            f"{s.writing_cpu:.2f}", f"{s.gain:.2f}", f"{100 * s.lost:.1f} %", f"{s.step:.2f}",
            f"{s.accepted:,} of {s.drafted:,}",
        )
        for s in savings
    ]  # fmt: skip
    table(
        rows,
        (
            "", "tok/s without", "with", "gain", "in CPU time", "prompt included", "time lost",
            "tokens a step", "drafts accepted",
        ),
        right=tuple(range(1, 9)),
    )  # fmt: skip
    steps = ", ".join(f"{rows} {1000 * seconds:.1f}" for rows, seconds in times.items())
    say(f"ms of a step by rows: {steps}")
    if svg:
        svg.write_text(chart(located.name, times, savings))


@bench.command()
@click.option("--isa", metavar="NAME", help="Instruction set. [the best of this host]")
@threads_option
@click.option(
    "--formats", help="Stored formats, separated by commas, like Q4_1,BF16. [all]", metavar="LIST"
)
@click.option(
    "--activations", type=click.Choice(["auto", "int8", "int16"]), default="int16",
    show_default=True, help="Precision of what quantized layers read.",
)  # fmt: skip
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
    activations: str,
    json_file: Path | None,
    svg: Path | None,
) -> None:
    """Speed of each kernel, beside what this host can do at most."""
    from dataclasses import asdict

    from octavo.backends import get_backend
    from octavo.bench.kernels import bench_kernels, measure_limits
    from octavo.bench.roofline import roofline
    from octavo.checkpoint.base import PACKED
    from octavo.engine.host import usable_threads
    from octavo.errors import UsageError

    isas = get_backend().kernels
    if isa is not None and isa not in isas:
        raise UsageError(f"--isa {isa}: this host runs {', '.join(isas)}", f"--isa {isas[0]}")
    wanted = {f.strip().upper() for f in formats.split(",")} if formats else None
    if wanted and (unknown := wanted - {k.name for k in PACKED}):
        raise UsageError(
            f"--formats {', '.join(sorted(unknown))}; there are {', '.join(k.name for k in PACKED)}"
        )
    limits = measure_limits(isa or isas[0], threads or usable_threads())
    say(
        f"{limits.isa}, {limits.threads} threads: memory {limits.read_gbs:.1f} GB/s, byte products "
        f"{limits.registers_gops:,.0f} GOPS in registers, {limits.widest_gops:,.0f} at most"
    )
    kinds = tuple(k for k in PACKED if not wanted or k.name in wanted)
    times = list(bench_kernels(limits, kinds, activations))
    table(
        [
            (
                t.kernel, t.shape, t.tokens, f"{t.microseconds:.1f}", f"{t.gbs:.1f}",
                f"{t.gops:.1f}", f"{t.percent:.0f}" if t.percent else "-",
            )
            for t in times
        ],
        ("kernel", "shape", "tokens", "us", "GB/s", "GOPS", "% of limit"),
        right=(2, 3, 4, 5, 6),
    )  # fmt: skip
    if json_file:
        record = {"limits": asdict(limits), "kernels": [asdict(t) for t in times]}
        json_file.write_text(json.dumps(record, indent=1) + "\n")
    if svg:
        svg.write_text(roofline(limits, times))


@bench.command()
@model_argument(default="smollm2")
@click.option(
    "--repeats", type=count(), default=3, show_default=True, help="Loads; medians are reported."
)
@threads_option
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

    t = bench_load(locate(model).path, repeats, threads)
    table(
        [
            (name, f"{s:.3f} s", f"{t.nbytes / s / 1e9:.2f} GB/s" if s > 0.001 else "")
            for name, s in (
                ("files to one buffer", t.buffer_seconds),
                ("files to new memory", t.memory_seconds),
                ("load", t.load_seconds),
                ("packing after that", t.packing_seconds),
                ("load packed", t.packed_seconds),
            )
        ],
        right=(1, 2),
    )
    say(f"peak {t.peak / 2**20:,.0f} MiB, {t.peak / t.planned:.2f} of what was planned")
    if json_file:
        json_file.write_text(json.dumps(asdict(t), indent=1) + "\n")
