"""Parts of SVG charts, without a plotting library."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

COLOURS = "#1f77b4 #ff7f0e #2ca02c #d62728 #9467bd #8c564b #e377c2 #7f7f7f #bcbd22 #17becf".split()


def text(x: float, y: float, words: str, anchor: str = "start", size: int = 12) -> str:
    """Words at a place; anchor: which end of them is there."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">'
        f"{escape(words)}</text>"
    )


def line(x0: float, y0: float, x1: float, y1: float, style: str) -> str:
    """A straight line; style: its attributes."""
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" {style}/>'


def document(width: int, height: int, parts: Iterable[str]) -> str:
    """A file of parts on white."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>\n"
    )
