"""octavo profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.numbers import Number
from octavo.cli.options import model_argument, sizing, speculation_option
from octavo.cli.remote import Remote, admin_key_option, server_option
from octavo.cli.screen import progress_bar, say, size, table

if TYPE_CHECKING:
    from octavo.bench.accounting import SpanTime, ThreadTime
    from octavo.bench.kernels import HostLimits
    from octavo.generate.trace import TracedProcess, TraceFile

FILE = click.Path(dir_okay=False, path_type=Path)
PROMPT = "The sea was calm, and"
ROWS = 12  # of kernels
ANSWER = 60.0  # seconds that a server gets to write a trace, beyond those that it records


@click.command()
@model_argument(required=False)
@click.option(
    "--request",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON as POST /v1/chat/completions or /v1/completions takes it.",
)
@click.option("-p", "--prompt", metavar="TEXT", help=f"Continue this text by 64 tokens. [{PROMPT}]")
@click.option(
    "--output",
    type=FILE,
    default="trace.json",
    show_default=True,
    metavar="FILE",
    help="The trace, for ui.perfetto.dev.",
)
@click.option("--stacks", type=FILE, metavar="FILE", help="Python stacks, for speedscope.app.")
@server_option("Profile a server that runs, instead of MODEL.")
@click.option(
    "--seconds",
    type=Number(0.1, 60),
    metavar="SECONDS",
    default=5,
    show_default=True,
    help="How long, of a server (0.1 to 60).",
)
@admin_key_option
@speculation_option
@sizing
def profile(
    model: str | None, file: Path | None, prompt: str | None, output: Path, stacks: Path | None,
    server: str | None, seconds: float, admin_key: str | None, offline: bool, mmproj: str,
    vision_dtype: str, device: str, **sizes: Any,
) -> None:  # fmt: skip
    """Say where the time of a request to MODEL goes, kernel by kernel, and draw it.

    Or what a server does for some seconds: octavo profile --server http://127.0.0.1:8000, where
    MODEL may be one of those that it serves.
    """
    import msgspec

    from octavo.errors import UsageError

    if model is None and server is None:
        raise UsageError("name a model, or a server", "octavo profile smollm2")
    if server is not None and (file is not None or prompt is not None):
        raise UsageError("--server is profiled with the requests that it has, none of its own")
    if file is not None and prompt is not None:
        raise UsageError("--request and --prompt are two requests", "octavo profile smollm2")
    limits = None
    if server is not None:
        trace = _ask(Remote(server, admin_key), seconds, model)
    else:
        assert model is not None
        trace, limits = _run(
            model, _body(file, prompt), offline, mmproj, vision_dtype, device, sizes
        )
    output.write_bytes(msgspec.json.encode(trace))
    if stacks is not None:
        stacks.write_text("".join(f"{s} {n}\n" for s, n in _stacks(trace)))
    show(trace, limits)
    say(f"{output}: open it in https://ui.perfetto.dev")


def _ask(server: Remote, seconds: float, model: str | None) -> TraceFile:
    """The trace of a server. Raises UsageError."""
    import msgspec

    from octavo.generate.trace import TraceFile

    body = {"seconds": seconds} | ({"model": model} if model is not None else {})
    return msgspec.json.decode(server.ask("/v1/profile", body, seconds + ANSWER), type=TraceFile)


def _body(file: Path | None, prompt: str | None) -> dict[str, Any]:
    """The request. Raises UsageError."""
    import msgspec

    from octavo.bench.profile import text_request
    from octavo.errors import UsageError

    if file is None:
        return text_request(PROMPT if prompt is None else prompt)
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise UsageError(f"{file} is no request: {e}") from None


def _run(
    model: str, body: dict[str, Any], offline: bool, mmproj: str, vision_dtype: str,
    device: str, sizes: dict[str, Any],
) -> tuple[TraceFile, HostLimits | None]:  # fmt: skip
    """The trace of a request to a model, and what the host can do if it computes. Raises
    OctavoError."""
    import uvloop

    from octavo.backends import resolve_device
    from octavo.bench.accounting import engines_of
    from octavo.bench.profile import host_limits, profile_request
    from octavo.checkpoint.hub import locate
    from octavo.engine.plan import make_plan
    from octavo.server.source import ModelOptions, ModelSource

    located = locate(model, offline=offline, progress=progress_bar)
    options = ModelOptions(
        located, located.name, mmproj=mmproj, vision_dtype=vision_dtype,
        device=resolve_device(device),
    )  # fmt: skip
    source = ModelSource(
        options,
        lambda opened: make_plan(
            opened.compiled, name=located.name, encoder=opened.encoder, **sizes
        ),
    )
    trace = uvloop.run(profile_request(source, body))
    (engine,) = engines_of(trace)
    return trace, host_limits(engine) if options.device == "cpu" else None


def _stacks(trace: TraceFile) -> list[tuple[str, int]]:
    """Stacks of all processes, each under the process's name."""
    processes = trace.otherData.processes
    return [(f"{p.name};{stack}", n) for p in processes for stack, n in p.stacks.items()]


def show(trace: TraceFile, limits: HostLimits | None) -> None:
    """Prints where the time and the memory of engines went."""
    from octavo.bench.accounting import account, engines_of

    if limits is not None:
        say(
            f"{limits.isa}, {limits.threads} threads: memory {limits.read_gbs:.1f} GB/s, "
            f"{limits.widest_gops:,.0f} byte GOPS, measured just now"
        )
    for engine in engines_of(trace):
        found = account(trace, engine)
        say(f"\n{engine.name}, {found.busy:.3f} s of work in {found.seconds:.3f} s")
        _kernels(found, limits)
        _calls(found)
        cut = "; then the trace was full" if engine.cut else ""
        say(f"accounted for: {100 * found.share:.1f} % of the time of work{cut}\n")
        _memory(engine)
    front = next(p for p in trace.otherData.processes if not p.isa)
    detokenize = account(trace, front).spent.get("detokenize")
    if detokenize is not None:
        say(f"front: {detokenize.count} events to text in {1000 * detokenize.seconds:.1f} ms")


def _kernels(found: ThreadTime, limits: HostLimits | None) -> None:
    kernels = [(name, s) for name, s in found.spent.items() if s.kind == "kernel"]
    if not kernels:  # of a GPU
        return
    kernels.sort(key=lambda item: -item[1].seconds)
    rows = [_kernel(name, s, found.busy, limits) for name, s in kernels[:ROWS]]
    if rest := kernels[ROWS:]:
        seconds = sum(s.seconds for _, s in rest)
        count = sum(s.count for _, s in rest)
        rows.append((f"{len(rest)} others", count, *_times(seconds, found.busy), "", "", "", ""))
    columns = ("kernel", "count", "ms", "% of work", "% waiting", "GB/s", "GOPS", "% of roofline")
    table(rows, columns, tuple(range(1, 8)))


def _times(seconds: float, whole: float) -> tuple[str, str]:
    return f"{1000 * seconds:.1f}", f"{100 * seconds / whole:.1f}"


def _kernel(name: str, s: SpanTime, busy: float, limits: HostLimits | None) -> tuple[object, ...]:
    rates = (f"{s.bytes / s.seconds / 1e9:.1f}", f"{s.operations / s.seconds / 1e9:.1f}")
    roof = f"{100 * s.bound(limits):.0f}" if limits is not None and s.bytes else "-"
    return (
        name, s.count, *_times(s.seconds, busy), f"{100 * s.waited / s.seconds:.0f}",
        *(rates if s.bytes else ("-", "-")), roof,
    )  # fmt: skip


def _calls(found: ThreadTime) -> None:
    """What the thread does beside kernels, by its own time."""
    from octavo.bench.accounting import HOLDERS, IDLE

    calls = [(n, s) for n, s in found.spent.items() if s.kind == "python" and n != IDLE]
    calls.sort(key=lambda item: -item[1].own)
    rows = [
        (f"{name} (rest)" if name in HOLDERS else name, s.count, *_times(s.own, found.busy))
        for name, s in calls
        if s.own / found.busy >= 0.0005
    ]
    table(rows, ("call", "count", "ms", "% of work"), (1, 2, 3))


def _memory(engine: TracedProcess) -> None:
    names = {
        "weights": "weights", "scratch": "scratch of kernels", "kv_cache": "KV cache",
        "kv_held": "  held by requests", "kv_prefix_cache": "  kept for prefixes",
        "encoder": "image encoder", "image_cache": "image cache", "adapters": "adapters",
        "draft": "draft model", "process": "process", "planned": "planned, most",
        "resident": "resident", "anonymous": "  of no file", "peak": "resident, most so far",
    }  # fmt: skip
    memory = engine.memory
    table(
        [(text, size(memory[n])) for n, text in names.items() if memory.get(n)],
        ("memory", ""),
        (1,),
    )
