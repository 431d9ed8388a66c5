"""Scenes of plain shapes or a digit, drawn at random, with questions about them.

python scenes.py 4 drawings/     # writes four drawings and prints what is asked about them
"""

from __future__ import annotations

import io
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

Color = tuple[int, int, int]
Question = tuple[str, str]  # with its answer

KINDS = ("circle", "square", "triangle")
COLORS = ("red", "green", "blue", "yellow", "black")
COUNTS = ("zero", "one", "two", "three", "four")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NOTHING = "none"
MOST = 4  # shapes of a scene

# Ranges of red, green and blue that go by a name.
RANGES = {
    "red": ((185, 255), (0, 65), (0, 65)),
    "green": ((0, 80), (115, 255), (0, 90)),
    "blue": ((0, 80), (0, 110), (165, 255)),
    "yellow": ((225, 255), (195, 255), (0, 80)),
    "black": ((0, 40), (0, 40), (0, 40)),
}
PURE = {
    "red": (255, 0, 0), "green": (0, 128, 0), "blue": (0, 0, 255), "yellow": (255, 255, 0),
    "black": (0, 0, 0),
}  # fmt: skip
SIZES = ((640, 480), (480, 640), (320, 240), (400, 300), (300, 200), (512, 512), (256, 256),
         (224, 224), (336, 336), (200, 200), (128, 128), (96, 96), (64, 64))  # fmt: skip

# Strokes of digits in a box of 2 by 4, from its upper left corner.
STROKES: dict[int, list[list[tuple[float, float]]]] = {
    0: [[(1, 0), (0.3, 0.5), (0, 2), (0.3, 3.5), (1, 4), (1.7, 3.5), (2, 2), (1.7, 0.5), (1, 0)]],
    1: [[(0.3, 0.8), (1, 0), (1, 4)], [(0.3, 4), (1.7, 4)]],
    2: [[(0, 0.8), (0.4, 0.2), (1, 0), (1.7, 0.3), (2, 1), (1.7, 1.8), (0, 4), (2, 4)]],
    3: [[(0, 0.5), (0.7, 0), (1.6, 0.2), (1.9, 1), (1.5, 1.7), (0.8, 1.9), (1.6, 2.1), (2, 2.9),
         (1.6, 3.8), (0.8, 4), (0, 3.5)]],
    4: [[(1.5, 4), (1.5, 0), (0, 2.7), (2, 2.7)]],
    5: [[(1.9, 0), (0.2, 0), (0.1, 1.8), (1, 1.5), (1.8, 1.9), (2, 2.8), (1.6, 3.7), (0.8, 4),
         (0, 3.6)]],
    6: [[(1.8, 0.3), (1, 0), (0.3, 0.7), (0, 2), (0.1, 3.2), (0.7, 3.9), (1.4, 3.9), (2, 3.2),
         (1.8, 2.2), (1, 1.8), (0.2, 2.4)]],
    7: [[(0, 0), (2, 0), (0.7, 4)]],
    8: [[(1, 1.9), (0.3, 1.5), (0.2, 0.6), (1, 0), (1.8, 0.6), (1.7, 1.5), (1, 1.9), (0.2, 2.4),
         (0, 3.3), (1, 4), (2, 3.3), (1.8, 2.4), (1, 1.9)]],
    9: [[(1.8, 1.6), (1, 2.2), (0.2, 1.8), (0, 0.8), (0.6, 0.1), (1.3, 0.1), (1.9, 0.8), (2, 2),
         (1.7, 3.3), (1, 4), (0.2, 3.7)]],
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A filled shape: its middle and half of its extent in pixels, and how far it is turned."""

    kind: str
    color: str
    paint: Color
    x: float
    y: float
    half: float
    turned: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.color} {self.kind}"


@dataclass(frozen=True)
class Scene:
    """What is drawn: shapes, or a digit (which is the only shape)."""

    width: int
    height: int
    ground: Color
    shapes: tuple[Shape, ...]
    digit: int | None = None


# -- drawing ----------------------------------------------------------------------------------


def _paint(rng: random.Random, color: str) -> Color:
    if rng.random() < 0.4:
        return PURE[color]
    while True:
        r, g, b = (rng.randint(*bounds) for bounds in RANGES[color])
        if color == "green" and g - max(r, b) < 60 or color == "blue" and b - max(r, g) < 85:
            continue
        return r, g, b


def _ground(rng: random.Random) -> Color:
    kind = rng.random()
    if kind < 0.45:
        return 255, 255, 255
    if kind < 0.7:
        grey = rng.randint(205, 254)
        return grey, grey, grey
    return rng.randint(205, 255), rng.randint(205, 255), rng.randint(205, 255)


def _extent(rng: random.Random) -> tuple[int, int]:
    """Width and height of a drawing."""
    if rng.random() < 0.35:
        return rng.choice(SIZES)
    side, aspect = int(math.exp(rng.uniform(math.log(72), math.log(400)))), 1.0
    if rng.random() < 0.6:
        aspect = math.exp(rng.uniform(math.log(0.55), math.log(1.8)))
    return max(48, int(side * aspect**0.5)), max(48, int(side / aspect**0.5))


def random_scene(rng: random.Random) -> Scene:
    """A scene of one to four shapes; at times none, at times a digit."""
    width, height = _extent(rng)
    least, ground = min(width, height), _ground(rng)
    what = rng.random()
    if what < 0.03:
        return Scene(width, height, ground, ())
    if what < 0.13:
        half = least * rng.uniform(0.2, 0.42)
        at = _place(rng, width, height, half)
        color = rng.choice(COLORS)
        shape = Shape("digit", color, _paint(rng, color), *at, half, rng.uniform(-8, 8))
        return Scene(width, height, ground, (shape,), rng.randrange(10))
    shapes: list[Shape] = []
    wanted = rng.choice((1, 2, 2, 3, 3, 4, 4))
    largest = {1: 0.42, 2: 0.28, 3: 0.24, 4: 0.22}[wanted]
    alike = rng.uniform(0.075, largest) if rng.random() < 0.4 else None
    row = rng.random() < 0.15  # side by side, as people draw
    for i in range(wanted):
        for _ in range(60):
            half = least * (alike or rng.uniform(0.075, largest))
            x, y = _place(rng, width, height, half)
            if row:
                x, y = width * (i + 0.5) / wanted, height * 0.5
                half = min(half, 0.42 * width / wanted)
            gap = 0.02 * least
            if all(_apart(s, x, y, half, gap) for s in shapes):
                shapes.append(_shape(rng, x, y, half))
                break
    return Scene(width, height, ground, tuple(shapes))


def _apart(s: Shape, x: float, y: float, half: float, gap: float) -> bool:
    """Whether a shape and what is to be at (x, y) do not touch, as circles or as squares."""
    far = math.hypot(s.x - x, s.y - y) > 1.1 * (s.half + half) + gap
    return far or max(abs(s.x - x), abs(s.y - y)) > s.half + half + gap


def _place(rng: random.Random, width: int, height: int, half: float) -> tuple[float, float]:
    inset = half * 1.03 + 1
    return rng.uniform(inset, width - inset), rng.uniform(inset, height - inset)


def _shape(rng: random.Random, x: float, y: float, half: float) -> Shape:
    kind, color, turned = rng.choice(KINDS), rng.choice(COLORS), 0.0
    if kind == "square" and rng.random() < 0.12:
        turned = rng.uniform(-20, 20)
    if kind == "triangle" and rng.random() < 0.3:
        turned = rng.choice((180, 90, -90, rng.uniform(-40, 40)))
    return Shape(kind, color, _paint(rng, color), x, y, half, turned)


def draw(scene: Scene, rng: random.Random) -> Image.Image:
    """The drawing of a scene, with sharp or smooth edges."""
    fine = 3 if scene.width * scene.height < 40_000 and rng.random() < 0.5 else 1
    size = scene.width * fine, scene.height * fine
    image = Image.new("RGB", size, scene.ground)
    pen = ImageDraw.Draw(image)
    style = rng.random()
    for shape in scene.shapes:
        _draw_shape(pen, shape, scene.digit, fine, style)
    return image.resize((scene.width, scene.height), Image.Resampling.BOX) if fine > 1 else image


def _draw_shape(
    pen: ImageDraw.ImageDraw, s: Shape, digit: int | None, fine: int, style: float
) -> None:
    x, y, half = s.x * fine, s.y * fine, s.half * fine
    sides = {"square": _SQUARE, "triangle": _UPRIGHT if style < 0.7 else _REGULAR}
    outline = tuple(c // 2 for c in s.paint) if 0.9 < style else None
    width = max(1, round(half * 0.06))
    if digit is not None:
        thick = max(2, round(half * (0.16 + 0.14 * style)))
        for stroke in STROKES[digit]:
            corners = [((a - 1) / 2, (b - 2) / 2.2) for a, b in stroke]
            line = [_turned(a, b, s.turned, x, y, half) for a, b in corners]
            pen.line(line, fill=s.paint, width=thick, joint="curve")
    elif s.kind == "circle":
        box = (x - half, y - half, x + half, y + half)
        pen.ellipse(box, fill=s.paint, outline=outline, width=width)
    else:
        corners = [_turned(a, b, s.turned, x, y, half) for a, b in sides[s.kind]]
        pen.polygon(corners, fill=s.paint, outline=outline, width=width)


_SQUARE = [(-0.95, -0.95), (0.95, -0.95), (0.95, 0.95), (-0.95, 0.95)]
_UPRIGHT = [(0.0, -1.0), (1.0, 1.0), (-1.0, 1.0)]
_REGULAR = [(0.0, -1.0), (0.866, 0.5), (-0.866, 0.5)]


def _turned(
    a: float, b: float, degrees: float, x: float, y: float, half: float
) -> tuple[float, float]:
    """A point of a unit box, turned and moved."""
    t = math.radians(degrees)
    shrink = 1 / max(1.0, abs(math.cos(t)) + 0.35 * abs(math.sin(2 * t)))
    c, s = math.cos(t) * shrink, math.sin(t) * shrink
    return x + half * (a * c - b * s), y + half * (a * s + b * c)


def as_file(image: Image.Image, rng: random.Random) -> bytes:
    """A drawing as a PNG or a JPEG file."""
    out = io.BytesIO()
    if rng.random() < 0.5:
        image.save(out, "PNG", compress_level=1)
    else:
        image.save(out, "JPEG", quality=rng.randint(50, 95))
    return out.getvalue()


# -- questions --------------------------------------------------------------------------------


def _say(rng: random.Random, *forms: str) -> str:
    """One of several ways to ask, the first most often; sometimes carelessly typed."""
    text = forms[0] if rng.random() < 0.5 else rng.choice(forms)
    if rng.random() < 0.1:
        text = text.replace("color", "colour")
    if rng.random() < 0.06:
        text = text.lower()
    return text.rstrip("?.") if rng.random() < 0.06 else text


def _count(things: list[Shape]) -> str:
    return COUNTS[len(things)]


def _color_of(rng: random.Random, scene: Scene) -> Question | None:
    kind = _kind_here(rng, scene, missing=0.06)
    colors = {s.color for s in scene.shapes if s.kind == kind}
    if len(colors) > 1:
        return None
    said = _say(rng, f"What color is the {kind}?", f"Which color does the {kind} have?",
                f"What is the color of the {kind}?", f"Name the color of the {kind}.")  # fmt: skip
    return said, colors.pop() if colors else NOTHING


def _kind_of(rng: random.Random, scene: Scene) -> Question | None:
    color = _color_here(rng, scene, missing=0.06)
    kinds = {s.kind for s in scene.shapes if s.color == color}
    if len(kinds) > 1:
        return None
    said = _say(rng, f"What shape is {color}?", f"Which shape is {color}?",
                f"What is the {color} shape?", f"What shape is the {color} one?")  # fmt: skip
    return said, kinds.pop() if kinds else NOTHING


def _only(rng: random.Random, scene: Scene) -> Question | None:
    """Questions that make sense where there is one shape."""
    if len(scene.shapes) != 1:
        return None
    (shape,) = scene.shapes
    if rng.random() < 0.5:
        said = _say(rng, "What shape is this?", "What shape is it?", "Which shape is shown?",
                    "What shape is in the image?", "What shape do you see?")  # fmt: skip
        return said, shape.kind
    said = _say(rng, "What color is it?", "What color is the shape?", "What color is this shape?",
                "Which color do you see?")  # fmt: skip
    return said, shape.color


def _how_many(rng: random.Random, scene: Scene) -> Question:
    said = _say(rng, "How many shapes are there?", "How many shapes do you see?",
                "How many shapes are in the image?", "Count the shapes.",
                "How many objects are there?")  # fmt: skip
    return said, _count(list(scene.shapes))


def _how_many_of(rng: random.Random, scene: Scene) -> Question:
    kind = _kind_here(rng, scene, missing=0.12)
    color = _color_here(rng, scene, missing=0.12)
    which = rng.random()
    if which < 0.45:
        things, found = f"{kind}s", [s for s in scene.shapes if s.kind == kind]
    elif which < 0.8:
        things, found = f"{color} shapes", [s for s in scene.shapes if s.color == color]
    else:
        kind = next((s.kind for s in scene.shapes if s.color == color), kind)
        things = f"{color} {kind}s"
        found = [s for s in scene.shapes if (s.color, s.kind) == (color, kind)]
    said = _say(rng, f"How many {things} are there?", f"How many {things} do you see?",
                f"How many {things} are in the image?", f"Count the {things}.")  # fmt: skip
    return said, _count(found)


def _where(rng: random.Random, scene: Scene) -> Question | None:
    inside = [s for s in scene.shapes if abs(s.x / scene.width - 0.5) > 0.1]
    sure = [s for s in inside if abs(s.y / scene.height - 0.5) > 0.1 and _only_one(scene, s)]
    if not sure:
        return None
    s = rng.choice(sure)
    words = ("top" if s.y < scene.height / 2 else "bottom",
             "left" if s.x < scene.width / 2 else "right")  # fmt: skip
    return _say(rng, f"Where is the {s.name}?", f"In which corner is the {s.name}?"), " ".join(
        words
    )


def _beside(rng: random.Random, scene: Scene) -> Question | None:
    """Which shape is on one side of another, in a scene of two."""
    if len(scene.shapes) != 2 or scene.shapes[0].name == scene.shapes[1].name:
        return None
    a, b = rng.sample(scene.shapes, 2)
    sides = {"left of": b.x - a.x, "right of": a.x - b.x, "above": b.y - a.y, "below": a.y - b.y}
    side = rng.choice(sorted(sides))
    apart = 0.12 * (scene.width if side.endswith("of") else scene.height)
    if abs(sides[side]) < apart or (sides[side] < 0 and rng.random() < 0.85):
        return None
    said = _say(rng, f"What shape is {side} the {b.name}?", f"Which shape is {side} the {b.name}?")
    return said, a.kind if sides[side] > 0 else NOTHING


def _is_there(rng: random.Random, scene: Scene) -> Question | None:
    if rng.random() < 0.6:
        shape = rng.choice(scene.shapes)
        kind, color = shape.kind, shape.color
    else:
        kind, color = rng.choice(KINDS), rng.choice(COLORS)
    there = any((s.kind, s.color) == (kind, color) for s in scene.shapes)
    said = _say(rng, f"Is there a {color} {kind}?", f"Do you see a {color} {kind}?")
    return said, "yes" if there else "no"


def caption(rng: random.Random, scene: Scene) -> Question:
    """Every shape by name, from left to right."""
    said = _say(rng, "Describe the image.", "What do you see?", "What is in the image?")
    if scene.digit is not None:
        return said, f"a {scene.shapes[0].color} {DIGITS[scene.digit]}"
    names = [f"a {s.name}" for s in sorted(scene.shapes, key=lambda s: s.x)]
    return said, ", ".join(names) or NOTHING


def _digit(rng: random.Random, scene: Scene) -> Question:
    (shape,) = scene.shapes
    if rng.random() < 0.7:
        said = _say(rng, "What digit is this?", "Which digit is shown?", "What number is this?")
        return said, DIGITS[scene.digit or 0]
    return _say(rng, "What color is the digit?", "What color is it?"), shape.color


def _only_one(scene: Scene, shape: Shape) -> bool:
    return [s.name for s in scene.shapes].count(shape.name) == 1


def _kind_here(rng: random.Random, scene: Scene, missing: float) -> str:
    there = sorted({s.kind for s in scene.shapes})
    return rng.choice(KINDS if rng.random() < missing or not there else there)


def _color_here(rng: random.Random, scene: Scene, missing: float) -> str:
    there = sorted({s.color for s in scene.shapes})
    return rng.choice(COLORS if rng.random() < missing or not there else there)


Ask = Callable[[random.Random, Scene], Question | None]
ASKED: tuple[tuple[Ask, float], ...] = (
    (_color_of, 5), (_kind_of, 5), (_how_many, 5), (_how_many_of, 4), (_only, 4), (_where, 3),
    (_beside, 4), (_is_there, 0.7),
)  # fmt: skip


def question(rng: random.Random, scene: Scene) -> Question:
    """A question about a scene, with its answer."""
    if scene.digit is not None:
        return _digit(rng, scene)
    if not scene.shapes:
        asked = rng.choice((_color_of, _kind_of, _how_many, _how_many_of))
        return asked(rng, scene) or _how_many(rng, scene)
    kinds, weights = zip(*ASKED, strict=True)
    while True:
        (asked,) = rng.choices(kinds, weights)
        if found := asked(rng, scene):
            return found


def held_out(count: int, seed: int = 1_000_003) -> list[tuple[bytes, str, str]]:
    """Image files with a question and its answer each; no seed of training makes them."""
    out = []
    for i in range(count):
        rng = random.Random(seed + i)
        scene = random_scene(rng)
        while not scene.shapes:
            scene = random_scene(rng)
        out.append((as_file(draw(scene, rng), rng), *question(rng, scene)))
    return out


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    folder.mkdir(exist_ok=True)
    for i, (data, asked, answer) in enumerate(held_out(int(sys.argv[1]))):
        kind = "png" if data.startswith(b"\x89PNG") else "jpg"
        (folder / f"{i}.{kind}").write_bytes(data)
        print(f"{i}.{kind}: {asked} {answer}")
