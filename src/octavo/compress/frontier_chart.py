"""The mixes that a search has measured, as a chart: megabytes across, KL up, both by powers."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, floor, log10

from octavo.compress.search import FoundMix, Point

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 620, 360, 64, 24, 44, 24
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#57606a}.line{stroke:#8c959f;fill:none}"
    ".mark{fill:#2563a8}.chosen{fill:#c2410c}"
    "@media(prefers-color-scheme:dark){text{fill:#9aa4ae}.mark{fill:#6ba9e8}.chosen{fill:#f59e5b}}"
)


def chart(found: FoundMix) -> bytes:
    """An SVG file, in UTF-8. Mixes that lose nothing lie below the axis' last power."""
    points = found.frontier
    lost = [p.kl for p in points if p.kl > 0] or [1e-6]
    low, high = floor(log10(min(lost))), ceil(log10(max(lost)))
    high += high == low
    most = max(p.nbytes for p in points) * 1.05

    def at(p: Point) -> tuple[float, float]:
        share = (max(log10(p.kl), low) - low) / (high - low) if p.kl > 0 else 0.0
        across = (WIDTH - LEFT - RIGHT) * p.nbytes / most
        return LEFT + across, HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * share

    def marks() -> Iterable[str]:
        places = [at(p) for p in points]
        yield f'<polyline class="line" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>'
        for p, (x, y) in zip(points, places, strict=True):
            kind = "chosen" if p == found.chosen else "mark"
            note = f"<title>{p.nbytes / 1e6:,.1f} MB, KL {p.kl:.4g}</title>"
            yield f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5">{note}</circle>'
        for power in range(low, high + 1):
            y = HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (power - low) / (high - low)
            yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>'
        for i in range(5):
            x = LEFT + (WIDTH - LEFT - RIGHT) * i / 4
            amount = f"{most * i / 4e6:,.0f}" if most > 2e7 else f"{most * i / 4e6:,.2f}"
            yield f'<text x="{x:.1f}" y="{HEIGHT - 24}" text-anchor="middle">{amount}</text>'
        yield f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">MB</text>'
        yield f'<text x="8" y="{TOP - 8}">KL, nats a token</text>'

    axes = f'<path class="line" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>'
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="KL of mixes by their size"'
    body = f"<style>{_STYLE}</style>{axes}{''.join(marks())}"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{body}</svg>'.encode()
