"""A roofline plot (Williams, Waterman and Patterson, 2009) as SVG, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from octavo.bench.kernels import HostLimits, KernelTime
from octavo.bench.svg import COLOURS, document, line, text

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 560, 80, 190, 40, 60


class _Axes:
    """Logarithmic axes over the given ranges of intensity and speed."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self.x0, self.x1 = math.floor(math.log10(min(xs))), math.ceil(math.log10(max(xs)))
        self.y0, self.y1 = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))

    def x(self, value: float) -> float:
        share = (math.log10(value) - self.x0) / (self.x1 - self.x0)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (math.log10(value) - self.y0) / (self.y1 - self.y0)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _grid(axes: _Axes) -> list[str]:
    out = []
    faint = 'stroke="#ddd"'
    for e in range(axes.x0, axes.x1 + 1):
        x = axes.x(10.0**e)
        out.append(line(x, TOP, x, HEIGHT - BOTTOM, faint))
        out.append(text(x, HEIGHT - BOTTOM + 18, f"{10.0**e:g}", "middle"))
    for e in range(axes.y0, axes.y1 + 1):
        y = axes.y(10.0**e)
        out.append(line(LEFT, y, WIDTH - RIGHT, y, faint))
        out.append(text(LEFT - 6, y + 4, f"{10.0**e:g}", "end"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    out.append(text(middle, HEIGHT - 16, "operations executed per byte of weights", "middle"))
    out.append(text(LEFT, TOP - 12, "GOPS executed, all threads"))
    return out


def _roofs(axes: _Axes, limits: HostLimits) -> list[str]:
    out = []
    left, right = 10.0**axes.x0, 10.0**axes.x1
    for name, peak in (("registers", limits.registers_gops), ("widest", limits.widest_gops)):
        ridge = min(max(peak / limits.read_gbs, left), right)
        style = 'stroke="#333" stroke-width="1.5"'
        low = max(limits.read_gbs * left, 10.0**axes.y0)
        out.append(
            line(axes.x(low / limits.read_gbs), axes.y(low), axes.x(ridge), axes.y(peak), style)
        )
        out.append(line(axes.x(ridge), axes.y(peak), axes.x(right), axes.y(peak), style))
        out.append(text(axes.x(right) + 6, axes.y(peak) + 4, f"{name} {peak:,.0f} GOPS"))
        if limits.registers_gops == limits.widest_gops:
            break
    out.append(text(LEFT + 8, TOP + 16, f"memory {limits.read_gbs:.1f} GB/s"))
    return out


def roofline(limits: HostLimits, times: Sequence[KernelTime]) -> str:
    """An SVG document: a dot per kernel under the roofs of memory and arithmetic."""
    points = [
        (t, t.executed / t.nbytes, t.executed / t.microseconds / 1e3)
        for t in times
        if not t.kernel.startswith("attention")
    ]
    xs = [x for _, x, _ in points] + [1.0]
    ys = [y for _, _, y in points] + [limits.widest_gops, limits.registers_gops]
    axes = _Axes(xs, ys)
    colour = {n: COLOURS[i % 10] for i, n in enumerate(dict.fromkeys(t.kernel for t in times))}
    parts = _grid(axes) + _roofs(axes, limits)
    for t, x, y in points:
        label = escape(f"{t.kernel} {t.shape}, {t.tokens} tokens: {y:,.0f} GOPS")
        parts.append(
            f'<circle cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="4" fill="{colour[t.kernel]}">'
            f"<title>{label}</title></circle>"
        )
    for i, name in enumerate(dict.fromkeys(t.kernel for t, _, _ in points)):
        y = TOP + 60 + 18 * i
        parts.append(f'<circle cx="{WIDTH - RIGHT + 20}" cy="{y}" r="4" fill="{colour[name]}"/>')
        parts.append(text(WIDTH - RIGHT + 30, y + 4, name))
    title = f"{limits.isa}, {limits.threads} threads"
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, 20, title, "middle", 14))
    return document(WIDTH, HEIGHT, parts)
