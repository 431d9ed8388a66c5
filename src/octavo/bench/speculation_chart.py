"""When drafts pay, as a chart: speed by the chance that a token of a draft is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from octavo.bench.speculation import Saving
from octavo.bench.svg import COLOURS, document, line, text

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 480, 70, 200, 40, 60
DEPTHS = (1, 2, 4, 8, 15)  # tokens of a draft
POINTS = 100  # of a curve


def speed_up(times: Mapping[int, float], depth: int, chance: float) -> float:
    """Speed with drafts of `depth` tokens against that without, where each is drawn with `chance`
    if those before it were. times: of a step by its rows, any unit."""
    tokens = sum(chance**i for i in range(depth + 1))
    return tokens * times[1] / times[depth + 1]


def chart(title: str, times: Mapping[int, float], savings: Sequence[Saving]) -> str:
    """An SVG document: a curve for each depth of a draft, and a dot for each text measured."""
    most = max([speed_up(times, d, 1.0) for d in DEPTHS] + [s.writing for s in savings])
    top = 0.5 * (int(2 * most) + 1)

    def x(chance: float) -> float:
        return LEFT + chance * (WIDTH - LEFT - RIGHT)

    def y(speed: float) -> float:
        return HEIGHT - BOTTOM - speed / top * (HEIGHT - TOP - BOTTOM)

    parts = []
    for i in range(int(2 * top) + 1):
        style = 'stroke="#333"' if i == 2 else 'stroke="#ddd"'
        parts.append(line(LEFT, y(i / 2), WIDTH - RIGHT, y(i / 2), style))
        parts.append(text(LEFT - 6, y(i / 2) + 4, f"{i / 2:g}", "end"))
    below = HEIGHT - BOTTOM + 18
    parts += [text(x(i / 10), below, f"{10 * i} %", "middle") for i in range(11)]
    for colour, depth in zip(COLOURS, DEPTHS, strict=False):
        shares = [i / POINTS for i in range(POINTS + 1)]
        places = " ".join(f"{x(p):.1f},{y(speed_up(times, depth, p)):.1f}" for p in shares)
        parts.append(f'<polyline points="{places}" fill="none" stroke="{colour}"/>')
        at = y(speed_up(times, depth, 1.0))
        parts.append(text(x(1) + 6, at + 4, f"{depth} token{'s' * (depth > 1)}"))
    for s in savings:
        right = s.accepted / s.drafted if s.drafted else 0.0
        note = escape(f"{s.name}: {s.accepted} of {s.drafted}, {s.writing:.2f}")
        place = f'cx="{x(right):.1f}" cy="{y(s.writing):.1f}"'
        parts.append(f'<circle {place} r="4" fill="#333"><title>{note}</title></circle>')
        parts.append(text(x(right) + 7, y(s.writing) - 5, s.name, size=11))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(text(middle, HEIGHT - 16, "draft tokens that are drawn", "middle"))
    parts.append(text(middle, 20, title, "middle", 14))
    parts.append(text(LEFT - 50, TOP - 12, "speed, 1 without drafts"))
    return document(WIDTH, HEIGHT, parts)
