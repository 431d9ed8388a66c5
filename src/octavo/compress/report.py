"""An evaluation as one HTML page that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from math import log10

from octavo.compress.evaluation import KL_EDGES, Evaluation, Pair
from octavo.errors import printable

WIDTH, HEIGHT, LEFT, BOTTOM = 460, 260, 48, 36  # of a chart, and of its axes' labels
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --faint: #6b7480; --line: #d8dde3;
  --paper: #ffffff; --mark: #2563a8; --card: #f4f6f8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --faint: #98a2ad; --line: #3a424b;
  --paper: #14171a; --mark: #6ba9e8; --card: #1d2126; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0 } h2 { font-size: 1.05rem; margin: 1.6rem 0 .4rem }
p, figcaption, th { color: var(--faint) } figure { margin: 0 }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .7rem }
.cards div { background: var(--card); border-radius: .5rem; padding: .6rem .8rem }
.cards b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1rem }
svg { width: 100%; height: auto } svg text { fill: var(--faint); font: 11px system-ui, sans-serif }
.axis { stroke: var(--line) } .mark { fill: var(--mark) } .dot { fill: var(--mark); opacity: .65 }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line);
  font-weight: normal } th:first-child, td:first-child, td.text { text-align: left }
td.text { font-family: ui-monospace, monospace; font-size: .85rem; white-space: pre-wrap;
  overflow-wrap: anywhere } mark { background: var(--mark); color: var(--paper) }
"""


def page(e: Evaluation) -> bytes:
    """The page, in UTF-8."""
    title = f"{e.model} against {e.against}"
    text = f"{e.tokens:,} tokens of {e.data}, {e.blocks} blocks of {e.length}"
    body = f"""<h1>{_text(title)}</h1><p>{_text(text)}</p>
<div class="cards">{"".join(_card(*c) for c in _figures(e))}</div>
<h2>Size and speed</h2>{_resources(e)}
<div class="charts">
<figure><h2>KL of each token</h2>{_histogram(e.kl_histogram)}
<figcaption>How far the distributions are apart, in nats.</figcaption></figure>
<figure><h2>NLL of each block</h2>{_scatter(e.block_nll)}
<figcaption>Nats a token: {_text(e.against)} across, {_text(e.model)} up.
On the line both are equal.</figcaption></figure></div>
<h2>Where they differ most</h2>{_worst(e)}"""
    head = f'<meta charset="utf-8"><title>{_text(title)}</title><style>{_STYLE}</style>'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1">'
    html = f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'
    return html.encode()


def _text(text: str) -> str:
    return escape(printable(text))


def _card(name: str, value: str, detail: str) -> str:
    return f"<div>{name}<b>{value}</b>{detail}</div>"


def _figures(e: Evaluation) -> Iterable[tuple[str, str, str]]:
    p = e.perplexity
    detail = f"{p.a:.3f}, was {p.b:.3f}; difference ± {p.standard_error:.2g}"
    yield "perplexity", f"{p.a / p.b - 1:+.2%}", detail
    yield "mean KL", f"{e.kl_mean:.4g}", f"99th percentile {e.kl_p99:.3g}"
    yield "same top-1", f"{e.top1:.2%}", "of tokens"
    detail = f"ROUGE-L {e.rouge_l:.3f}, {e.identical:.0%} of {e.outputs} texts identical"
    yield "BLEU-4", f"{e.bleu4:.1f} ± {e.bleu4_error:.1f}", detail
    c = e.choices
    yield "same choice", f"{c.agreement:.1%}", f"of {c.items}; right {c.a:.0%}, was {c.b:.0%}"
    yield "size", f"{e.bytes.a / 1e6:,.1f} MB", f"was {e.bytes.b / 1e6:,.1f} MB"


def _resources(e: Evaluation) -> str:
    rows = (
        ("Size, MB", e.bytes, 1e-6), ("Loading, s", e.load_seconds, 1.0),
        ("Prefill, tokens/s", e.prefill_tps, 1.0), ("Decoding, tokens/s", e.decode_tps, 1.0),
        ("Peak memory, MB", e.peak_rss, 1e-6),
    )  # fmt: skip
    cells = "".join(
        f"<tr><td>{name}<td>{x.a * scale:,.2f}<td>{x.b * scale:,.2f}<td>{_ratio(x)}"
        for name, x, scale in rows
    )
    return f"<table><tr><th><th>{_text(e.model)}<th>{_text(e.against)}<th>ratio{cells}</table>"


def _ratio(pair: Pair) -> str:
    return f"{pair.a / pair.b:.2f}" if pair.b else ""


def _svg(label: str, content: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f'<path class="axis" fill="none" d="M{LEFT} 8V{HEIGHT - BOTTOM}H{WIDTH - 8}"/>'
        f"{''.join(content)}</svg>"
    )


def _histogram(counts: tuple[int, ...]) -> str:
    highest, bottom = max(counts), HEIGHT - BOTTOM
    step = (WIDTH - 8 - LEFT) / len(counts)

    def marks() -> Iterable[str]:
        for i, n in enumerate(counts):
            height = (bottom - 16) * n / max(1, highest)
            yield (
                f'<rect class="mark" x="{LEFT + i * step + 1:.1f}" y="{bottom - height:.1f}" '
                f'width="{step - 2:.1f}" height="{height:.1f}"><title>{n:,}</title></rect>'
            )
        for i, edge in enumerate(KL_EDGES):
            if i % 4 == 0:
                x = LEFT + (i + 1) * step
                exponent = f"1e{round(log10(edge))}"
                yield f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{exponent}</text>'
        yield f'<text x="{LEFT - 6}" y="20" text-anchor="end">{highest:,}</text>'

    return _svg("Histogram of KL", marks())


def _scatter(points: tuple[Pair, ...]) -> str:
    values = [v for p in points for v in (p.a, p.b)]
    low, high = min(values), max(values)
    margin = (high - low) / 20 or 0.1
    low, high = low - margin, high + margin
    wide, tall = WIDTH - 8 - LEFT, HEIGHT - BOTTOM - 8

    def at(value: float) -> float:
        return (value - low) / (high - low)

    def marks() -> Iterable[str]:
        yield f'<path class="axis" d="M{LEFT} {8 + tall}L{LEFT + wide} 8"/>'
        for i, p in enumerate(points):
            x, y = LEFT + wide * at(p.b), 8 + tall * (1 - at(p.a))
            note = f"<title>block {i}: {p.a:.4f}, was {p.b:.4f}</title>"
            yield f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4">{note}</circle>'
        for value in (low + margin, high - margin):
            x, y = LEFT + wide * at(value), 8 + tall * (1 - at(value))
            yield f'<text x="{x:.1f}" y="{HEIGHT - 20}" text-anchor="middle">{value:.2f}</text>'
            yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>'

    return _svg("NLL of blocks", marks())


def _worst(e: Evaluation) -> str:
    rows = "".join(
        f'<tr><td class="text">{_text(w.before)}<mark>{_text(w.token)}</mark>'
        f"<td>{w.kl:.3f}<td>{w.nll.a:.2f}<td>{w.nll.b:.2f}"
        for w in e.worst
        if w.kl > 0
    )
    if not rows:
        return "<p>They differ nowhere.</p>"
    names = f"<th>NLL, {_text(e.model)}<th>NLL, {_text(e.against)}"
    return f"<table><tr><th>Token, after its text<th>KL{names}{rows}</table>"
