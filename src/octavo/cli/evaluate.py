"""octavo evaluate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.numbers import Number, count
from octavo.cli.options import (
    F,
    activations_option,
    kv_dtype_option,
    model_argument,
    offline_option,
    threads_option,
    together,
)
from octavo.cli.screen import say, step_bar, table

if TYPE_CHECKING:
    from octavo.compress.evaluation import Evaluation, Pair

_BOUNDS = (
    ("--max-kl", Number(0), "Most mean KL, nats a token."),
    ("--max-kl-p99", Number(0), "Most that the 99th percentile of KL may be."),
    ("--max-perplexity", Number(0), "Most percent that perplexity may be above --against's."),
    ("--min-top1", Number(0, 1), "Least share of tokens with the same likeliest token (0 to 1)."),
    ("--min-bleu4", Number(0, 100), "Least BLEU-4 of greedy outputs (0 to 100)."),
    ("--min-choices", Number(0, 1), "Least share of choices with the same answer (0 to 1)."),
)  # fmt: skip
_bounds = together(*(click.option(name, type=kind, help=text) for name, kind, text in _BOUNDS))


def _file(name: str, text: str) -> Callable[[F], F]:
    kind = click.Path(dir_okay=False, path_type=Path)
    return click.option(f"--{name}", f"{name}_file", type=kind, metavar="FILE", help=text)


@click.command()
@model_argument()
@click.option("--against", required=True, metavar="MODEL", help="The model it was made from.")
@click.option(
    "--data", type=click.Path(path_type=Path), metavar="PATH",
    help="Text: .txt, .jsonl, a folder of them, or self: what --against writes. [Python's manual]",
)  # fmt: skip
@click.option(
    "--tokens",
    type=count(256),
    default=16_384,
    show_default=True,
    help="How many to predict (from 256).",
)
@click.option(
    "--length",
    type=count(32),
    default=512,
    show_default=True,
    help="Tokens of a block of text (from 32).",
)
@threads_option
@activations_option
@kv_dtype_option
@offline_option
@click.option("--save", is_flag=True, help="Keep the figures beside MODEL, for `octavo show`.")
@_file("json", "Also write the figures here.")
@_file("html", "Also write a page with charts here.")
@_bounds
def evaluate(
    model: str, against: str, data: Path | None, tokens: int, length: int, threads: int | None,
    activations: str, kv_dtype: str, offline: bool, save: bool, json_file: Path | None,
    html_file: Path | None, **bounds: Any,
) -> None:  # fmt: skip
    """Measure what MODEL has lost against the one it was made from, and what it has gained.

    --activations and --kv-dtype are MODEL's; the other computes with what it does by default.
    Exits with 1 if a bound is broken.
    """
    from octavo.checkpoint import open_checkpoint
    from octavo.checkpoint.hub import locate
    from octavo.checkpoint.places import check_report
    from octavo.checkpoint.writer import replacing
    from octavo.compress.evaluate import evaluate as measure
    from octavo.compress.evaluation import Bounds, quality_file, to_json
    from octavo.compress.evaluation import save as keep
    from octavo.compress.report import page

    for file in (json_file, html_file):
        check_report(file)
    if save:
        check_report(quality_file(locate(model, offline=offline).path))
    found = measure(
        model, against=against, data=data, tokens=tokens, length=length, threads=threads,
        activations=activations, kv_dtype=kv_dtype, offline=offline, progress=step_bar,
    )  # fmt: skip
    _show(found)
    for file, make in ((json_file, to_json), (html_file, page)):
        if file is not None:
            with replacing(file) as out:
                out.write(make(found))
    if save:
        checkpoint = open_checkpoint(locate(model, offline=True).path)
        say(f"kept in {keep(found, checkpoint)}")
    broken = Bounds(**bounds).broken(found)
    for line in broken:
        say(f"broken: {line}", err=True)
    if broken:
        raise click.exceptions.Exit(1)


def _show(e: Evaluation) -> None:
    p, n = e.perplexity, e.nll
    alike = (
        f"BLEU-4 {e.bleu4:.1f} ± {e.bleu4_error:.1f}, ROUGE-L {e.rouge_l:.3f}, "
        f"{e.identical:.0%} of {e.outputs} identical"
    )
    nats = f"{n.difference:+.4f} ± {n.standard_error:.4f}"
    rows: list[tuple[object, ...]] = [
        ("perplexity", f"{p.a:.4f}", f"{p.b:.4f}", _change(p.a, p.b)),
        ("nats a token", f"{n.a:.4f}", f"{n.b:.4f}", nats),
        ("right choices", f"{e.choices.a:.1%}", f"{e.choices.b:.1%}", ""),
        ("size MB", *_both(e.bytes, 1e-6)),
        ("loading s", *_both(e.load_seconds)),
        ("prefill tok/s", *_both(e.prefill_tps)),
        ("decode tok/s", *_both(e.decode_tps)),
        ("peak memory MB", *_both(e.peak_rss, 1e-6)),
    ]  # fmt: skip
    table(rows, ("", e.model, e.against, ""), right=(1, 2, 3))
    say()
    table([
        ("KL", f"{e.kl_mean:.6f} on average, {e.kl_p99:.5f} at the 99th percentile"),
        ("same top-1", f"{e.top1:.2%}"),
        ("same choice", f"{e.choices.agreement:.1%} of {e.choices.items}"),
        ("greedy outputs", alike),
    ])  # fmt: skip
    say(f"{e.tokens:,} tokens of {e.data} in {e.blocks} blocks of {e.length}")
    say(f"{e.model} computed with activations {e.activations}, KV cache {e.kv_dtype}")


def _both(pair: Pair, scale: float = 1.0) -> tuple[str, str, str]:
    return f"{pair.a * scale:,.1f}", f"{pair.b * scale:,.1f}", _change(pair.a, pair.b)


def _change(a: float, b: float) -> str:
    return f"{a / b - 1:+.1%}" if b else ""
