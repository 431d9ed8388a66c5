"""An experiment as one HTML page that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

import numpy as np

from octavo.errors import printable
from octavo.experiments.analysis import Analysis, Comparison, Mismatch
from octavo.experiments.spec import ExperimentSpec
from octavo.experiments.totals import Key, Total, units_of

WIDTH, ROW, LEFT, RIGHT = 640, 34, 190, 20  # of charts
BARS, TALL = 24, 150  # of histograms
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --faint: #6b7480; --line: #d8dde3;
  --paper: #fff; --mark: #2563a8; --other: #c2410c }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --faint: #98a2ad; --line: #3a424b;
  --paper: #14171a; --mark: #6ba9e8; --other: #f59e5b } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem; margin: 0 } h2 { font-size: 1.05rem; margin: 1.6rem 0 .4rem }
p, th, figcaption { color: var(--faint) } figure { margin: 0 }
.alarm { background: #b42318; color: #fff; padding: .8rem 1rem; border-radius: .4rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line);
  font-weight: normal } th:first-child, td:first-child { text-align: left }
svg { width: 100%; height: auto } text { fill: var(--faint); font: 12px system-ui, sans-serif }
.axis { stroke: var(--line) } .mark { stroke: var(--mark); fill: var(--mark) }
.other { stroke: var(--other); fill: none; stroke-width: 2 } .bar { fill: var(--mark); opacity: .5 }
"""


def page(spec: ExperimentSpec, totals: Mapping[Key, Total], found: Analysis) -> bytes:
    """The page, in UTF-8. Where units are not dealt as they should be, it shows no differences:
    they would be of other people, not of other variants."""
    counts = ", ".join(f"{_text(name)} {n:,}" for name, n in found.mismatch.counts.items())
    moved = f"; {found.moved:,} changed their variant and are left out" if found.moved else ""
    body = f"<h1>{_text(spec.id)}</h1><p>Units: {counts}{moved}.</p>"
    if found.mismatch.found:
        body += _alarm(found.mismatch)
    elif not found.comparisons:
        body += "<p>Too few units of each variant to compare them yet.</p>"
    else:
        body += f"<h2>Differences from {_text(spec.control)}</h2>{_forest(found.comparisons)}"
        body += _table(found.comparisons)
        if found.waiting:
            waiting = _text(", ".join(found.waiting))
            body += f"<p>Too few units yet, or none that differ: {waiting}.</p>"
        body += f"<p>{_method(spec)}</p>"
        body += "".join(_spread(spec, totals, metric) for metric in spec.metrics)
    head = f'<meta charset="utf-8"><title>{_text(spec.id)}</title><style>{_STYLE}</style>'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1">'
    html = f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'
    return html.encode()


def _text(text: str) -> str:
    return escape(printable(text))


def _alarm(m: Mismatch) -> str:
    wanted = ", ".join(f"{_text(name)} {n:,.0f}" for name, n in m.expected.items())
    return (
        f'<p class="alarm">The variants do not have their shares of the units: {wanted} were to be '
        f"expected (evidence e^{m.evidence:.1f}). Something decides who is counted, so that "
        "nothing can be said. Look for failures or redirects of one variant alone.</p>"
    )


def _method(spec: ExperimentSpec) -> str:
    cuped = f" Covariates (CUPED): {', '.join(spec.cuped)}." if spec.cuped else ""
    return (
        f"Intervals hold at all times together in {1 - spec.alpha:.0%} of experiments, so that one "
        f"may look, and stop, at any time. {_text(spec.metrics[0])} decides; of the other metrics "
        f"each is wrong in {spec.alpha:.0%}.{cuped}"
    )


def _table(rows: Iterable[Comparison]) -> str:
    cells = "".join(
        f"<tr><td>{_text(c.metric)}<td>{_text(c.variant)}<td>{c.value:.4g}<td>{c.control:.4g}"
        f"<td>{c.difference:+.3g}<td>{c.low:+.3g} to {c.high:+.3g}<td>{c.units:,}"
        f"<td>{c.explained:.0%}<td>{'yes' if c.decided else 'no'}"
        for c in rows
    )
    names = ("metric", "variant", "mean", "control", "difference", "interval", "units",
             "variance explained", "decided")  # fmt: skip
    return f"<table><tr>{''.join(f'<th>{n}' for n in names)}{cells}</table>"


def _svg(label: str, height: float, content: Iterable[str]) -> str:
    size = f'viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{_text(label)}"'
    return f"<svg {size}>{''.join(content)}</svg>"


def _forest(found: tuple[Comparison, ...]) -> str:
    """Each interval, in percent of the control's mean."""
    parts = [(c, 100 / abs(c.control)) for c in found if c.control]
    ends = [abs(end * percent) for c, percent in parts for end in (c.low, c.high)]
    most = max(ends, default=1.0) or 1.0
    height = ROW * len(parts) + 40

    def x(percent: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (0.5 + percent / most / 2)

    def marks() -> Iterable[str]:
        yield f'<path class="axis" d="M{x(0):.1f} 4V{height - 28}"/>'
        for i, (c, percent) in enumerate(parts):
            low, middle, high = c.low * percent, c.difference * percent, c.high * percent
            y = ROW * i + ROW / 2
            title = f"{c.metric}, {c.variant}"
            yield f'<text x="4" y="{y + 4:.1f}">{_text(title[:30])}</text>'
            yield f'<path class="mark" stroke-width="2" d="M{x(low):.1f} {y}H{x(high):.1f}"/>'
            note = f"<title>{middle:+.2f} % ({low:+.2f} to {high:+.2f})</title>"
            yield f'<circle class="mark" cx="{x(middle):.1f}" cy="{y}" r="5">{note}</circle>'
        for end in (-most, 0.0, most):
            yield (
                f'<text x="{x(end):.1f}" y="{height - 10}" text-anchor="middle">{end:+.3g} %</text>'
            )

    return f"<figure>{_svg('Differences with their intervals', height, marks())}</figure>"


def _spread(spec: ExperimentSpec, totals: Mapping[Key, Total], metric: str) -> str:
    """How units' means are spread: bars of the control, lines of the others."""
    means = {}
    for name in spec.variants:
        units = units_of(totals, name, metric, ())
        if len(units):
            means[name] = units.totals / units.counts
    if spec.control not in means:
        return ""
    every = np.concatenate(list(means.values()))
    low, high = float(every.min()), float(np.quantile(every, 0.99))
    if low >= high:
        return ""
    edges = np.linspace(low, high, BARS + 1)
    shares = {name: np.histogram(m, edges)[0] / len(m) for name, m in means.items()}
    most = max(float(share.max()) for share in shares.values()) or 1.0
    step = (WIDTH - LEFT - RIGHT) / BARS

    def marks() -> Iterable[str]:
        for name, share in shares.items():
            heights = (TALL - 10) * share / most
            if name == spec.control:
                for i, tall in enumerate(heights):
                    yield (
                        f'<rect class="bar" x="{LEFT + i * step:.1f}" y="{TALL - tall:.1f}" '
                        f'width="{step - 1:.1f}" height="{tall:.1f}"/>'
                    )
            else:
                line = " ".join(
                    f"{LEFT + (i + 0.5) * step:.1f},{TALL - h:.1f}" for i, h in enumerate(heights)
                )
                note = f"<title>{_text(name)}</title>"
                yield f'<polyline class="other" points="{line}">{note}</polyline>'
        for at, value in ((LEFT, low), (WIDTH - RIGHT, high)):
            yield f'<text x="{at}" y="{TALL + 18}" text-anchor="middle">{value:.3g}</text>'

    caption = f"Means of units: {_text(spec.control)} as bars, others as lines; up to 99 %."
    chart = _svg(f"How {metric} is spread", TALL + 24, marks())
    return f"<h2>{_text(metric)}</h2><figure>{chart}<figcaption>{caption}</figcaption></figure>"
