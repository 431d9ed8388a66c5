"""Recipes as YAML, checked as they are read: what is wrong is said with its line.

    summary: 4 bits by GPTQ, 8 in the first layer
    method: gptq
    formats: [gptq, compressed-tensors]
    weights: {bits: 4, group: 64, symmetric: false}
    layers:
      - match: model.layers.0.*
        weights: {bits: 8, group: 64, symmetric: true}
      - match: ["*.k_proj.weight", "*.v_proj.weight"]
        weights: keep

`vision: int8-dynamic` rounds what encodes images, too; `kv: int8` says how keys and values are to
be cached. A GGUF file's has `formats: [gguf]` and a `file_type`, and its weights are types such as
Q4_K.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml

from octavo.checkpoint.base import TensorType
from octavo.checkpoint.files import read_file
from octavo.compress.blocks import ENCODED
from octavo.compress.grids import Grid, Scheme
from octavo.compress.recipes import (
    LAYOUTS,
    METHODS,
    WHERE,
    Activations,
    FolderRecipe,
    GgufRecipe,
    KvDtype,
    Layout,
    Method,
    Recipe,
    Rule,
)
from octavo.errors import CheckpointError, OctavoError, UsageError

T = TypeVar("T")
MAX_FILE = 1 << 20
INT8 = Grid(8, 0, True)  # what is multiplied with int8 activations
VISION: Mapping[str, Scheme] = {"int8-dynamic": INT8, "fp8": "fp8"}
_WITH_ACTIVATIONS = {"compressed-tensors", "safetensors"}  # formats that fp8 and activations have
_TYPES = {t.name: t for t in (*ENCODED, TensorType.F16, TensorType.BF16, TensorType.F32)}


def find_recipe(name: str) -> Recipe:
    """A built-in recipe by name, or one's own by its path. Raises UsageError."""
    known = builtin()
    if name in known:
        return known[name]
    if name.endswith((".yaml", ".yml")):
        try:
            text = read_file(Path(name), MAX_FILE).decode()
        except (CheckpointError, UnicodeDecodeError) as e:
            raise UsageError(f"cannot read the recipe {name}: {e}") from None
        return replace(read_recipe(text, name), file=name)
    raise UsageError(f"no recipe {name!r}; there are {', '.join(known)}", "--recipe q4_k_m")


def builtin() -> dict[str, Recipe]:
    """The recipes that come with Octavo, by name, in the order of their files' numbers."""
    out: dict[str, Recipe] = {}
    folder = files("octavo.compress") / "builtin"
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".yaml"):
            name = file.name.removesuffix(".yaml").partition(".")[2]
            out[name] = read_recipe(file.read_text(), file.name, name)
    return out


def read_recipe(text: str, file: str, name: str | None = None) -> Recipe:
    """A recipe from YAML. Raises UsageError with the line of what is wrong."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as e:
        mark = getattr(e, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise UsageError(f"{file}{line}: {getattr(e, 'problem', None) or 'not YAML'}") from None
    top = _Node(root, file)
    entries = top.mapping("summary", "method", "formats", "weights", "layers", "activations",
                          "vision", "kv", "file_type", need=("formats", "weights"))  # fmt: skip
    own = name or Path(file).stem
    summary = entries["summary"].text() if "summary" in entries else own
    formats = [f.one_of(("gguf", *LAYOUTS)) for f in entries["formats"].items()]
    if "gguf" in formats:
        return _gguf(own, summary, formats, entries, top)
    return _folder(own, summary, entries)


def _gguf(
    name: str, summary: str, formats: list[str], entries: Mapping[str, _Node], top: _Node
) -> GgufRecipe:
    if len(formats) > 1:
        raise entries["formats"].wrong("gguf has types of its own, and no other format beside it")
    for key in ("method", "activations", "vision", "kv"):
        if key in entries:
            raise entries[key].wrong(f"{key} is of folders, not of GGUF files")
    if "file_type" not in entries:
        raise top.wrong("file_type is missing: the number that GGUF has for the mix, such as 15")

    def kind(node: _Node) -> TensorType:
        if node.is_text("keep"):
            raise node.wrong("'keep' is of folders; tensors of GGUF files get a type such as F16")
        return _TYPES[node.one_of(tuple(_TYPES))]

    rules = _rules(entries, kind, True)
    return GgufRecipe(name, summary, kind(entries["weights"]), rules, entries["file_type"].number())


def _folder(name: str, summary: str, entries: Mapping[str, _Node]) -> FolderRecipe:
    if "file_type" in entries:
        raise entries["file_type"].wrong("file_type is of GGUF files")
    method: Method = entries["method"].one_of(METHODS) if "method" in entries else "rtn"
    layouts: tuple[Layout, ...] = tuple(f.one_of(LAYOUTS) for f in entries["formats"].items())
    activations: Activations | None = None
    if "activations" in entries:
        activations = entries["activations"].one_of(get_args(Activations))
    schemes: list[tuple[_Node, Scheme]] = []

    def scheme(node: _Node) -> Scheme:
        schemes.append((node, _scheme(node)))
        return schemes[-1][1]

    def kept_or_scheme(node: _Node) -> Scheme | None:
        return None if node.is_text("keep") else scheme(node)

    weights, rules = kept_or_scheme(entries["weights"]), _rules(entries, kept_or_scheme, False)
    vision = VISION[entries["vision"].one_of(tuple(VISION))] if "vision" in entries else None
    kv: KvDtype | None = entries["kv"].one_of(get_args(KvDtype)) if "kv" in entries else None
    recipe = FolderRecipe(name, summary, weights, layouts, method, rules, activations, vision, kv)
    for key in ("vision", "kv"):
        if key in entries and layouts != ("compressed-tensors",):
            raise entries[key].wrong(f"{key} is stored as compressed-tensors only")
    if weights is None and method != "rtn":
        raise entries["weights"].wrong(f"{method} needs a scheme; 'keep' goes without a method")
    if "awq" in layouts and any(isinstance(r.becomes, Grid) for r in rules):
        raise entries["layers"].wrong("an AWQ folder has one scheme; other layers can be kept")
    for node, each in schemes:
        _check_stored(node, each, recipe, entries)
    if activations is not None:
        _check_activations(recipe, entries, schemes)
    elif method == "smoothquant":
        raise entries["method"].wrong("smoothquant takes activations: dynamic or static")
    return recipe


def _check_stored(
    node: _Node, scheme: Scheme, recipe: FolderRecipe, entries: Mapping[str, _Node]
) -> None:
    """Raises UsageError for weights that a method does not make, or that a format cannot hold."""
    if scheme == "fp8":
        if recipe.method != "rtn":
            raise node.wrong(f"{recipe.method} rounds to integers, not to fp8")
        if set(recipe.layouts) - _WITH_ACTIVATIONS:
            raise entries["formats"].wrong("fp8 is stored as compressed-tensors or safetensors")
        return
    for layout in ("awq", "mlx"):
        if layout in recipe.layouts and not scheme.group:
            raise node.wrong(f"{layout} stores no whole rows (group: 0); groups of 32, 64 or 128")
    if "awq" in recipe.layouts and scheme.bits != 4:
        raise node.wrong(f"awq stores 4 bits, not {scheme.bits}")


def _check_activations(
    recipe: FolderRecipe, entries: Mapping[str, _Node], schemes: list[tuple[_Node, Scheme]]
) -> None:
    """Raises UsageError for activations that methods, formats or weights do not go with."""
    wrong = entries["activations"].wrong
    if recipe.method not in ("rtn", "smoothquant"):
        raise wrong(f"activations go with method: rtn or smoothquant, not with {recipe.method}")
    if any(s not in (INT8, "fp8") for _, s in schemes):
        raise wrong("activations take {bits: 8, group: 0, symmetric: true}, or fp8")
    if set(recipe.layouts) - _WITH_ACTIVATIONS:
        raise wrong("activations are stored as compressed-tensors or safetensors only")
    if recipe.activations == "static" and recipe.method == "rtn":
        raise wrong("static steps are found with method: smoothquant")


def _rules(
    entries: Mapping[str, _Node], becomes: Callable[[_Node], Scheme | TensorType | None],
    gguf: bool,
) -> tuple[Rule, ...]:  # fmt: skip
    out = []
    for item in entries["layers"].items() if "layers" in entries else ():
        parts = item.mapping("match", "weights", "where", need=("match", "weights"))
        match = parts["match"]
        patterns = (match,) if match.is_text() else match.items()
        if "where" in parts and not gguf:
            raise parts["where"].wrong("where is of GGUF files; match names layers of folders")
        where = parts["where"].one_of(WHERE) if "where" in parts else None
        out.append(Rule(tuple(p.text() for p in patterns), becomes(parts["weights"]), where))
    return tuple(out)


def _scheme(node: _Node) -> Scheme:
    """Integers, or fp8."""
    if node.is_text():
        node.one_of(("fp8",))
        return "fp8"
    parts = node.mapping("bits", "group", "symmetric", "scales", need=("bits",))
    try:
        return Grid(
            parts["bits"].number(),
            parts["group"].number() if "group" in parts else 64,
            parts["symmetric"].truth() if "symmetric" in parts else True,
            parts["scales"].one_of(("f16", "bf16", "f32")) if "scales" in parts else "f16",
        )
    except UsageError as e:
        raise e if str(e).startswith(node.file) else node.wrong(str(e)) from None


class _Node:
    """A value of a YAML document, and where it stands."""

    def __init__(self, node: Any, file: str) -> None:
        self._node, self.file = node, file

    def wrong(self, what: str) -> OctavoError:
        line = self._node.start_mark.line + 1 if self._node is not None else 1
        return UsageError(f"{self.file}, line {line}: {what}")

    def mapping(self, *known: str, need: tuple[str, ...]) -> dict[str, _Node]:
        """Entries by key; of one key only one, all of them known."""
        if not isinstance(self._node, yaml.MappingNode):
            raise self.wrong(f"expected entries such as {need[0]}: ...")
        out: dict[str, _Node] = {}
        for key, value in self._node.value:
            name = _Node(key, self.file).text()
            if name not in known:
                raise _Node(key, self.file).wrong(f"unknown entry {name!r}; {', '.join(known)}")
            if name in out:
                raise _Node(key, self.file).wrong(f"{name} is there twice")
            out[name] = _Node(value, self.file)
        for name in need:
            if name not in out:
                raise self.wrong(f"{name} is missing")
        return out

    def items(self) -> list[_Node]:
        if not isinstance(self._node, yaml.SequenceNode) or not self._node.value:
            raise self.wrong("expected a list such as [a, b]")
        return [_Node(item, self.file) for item in self._node.value]

    def is_text(self, value: str | None = None) -> bool:
        return isinstance(self._node, yaml.ScalarNode) and value in (None, self._node.value)

    def text(self) -> str:
        if not isinstance(self._node, yaml.ScalarNode) or not self._node.value:
            raise self.wrong("expected a text")
        return str(self._node.value)

    def one_of(self, known: tuple[T, ...]) -> T:
        text = self.text()
        if text not in known:
            raise self.wrong(f"{text!r} is none of {', '.join(map(str, known))}")
        return known[known.index(text)]

    def number(self) -> int:
        text = self.text()
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise self.wrong(f"{text!r} is no whole number")
        return int(text)

    def truth(self) -> bool:
        return self.one_of(("true", "false")) == "true"
