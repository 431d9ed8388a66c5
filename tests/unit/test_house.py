"""Rules of the house: imports go downward, files and functions stay small."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "octavo"

# Each room may import from those after it in its row, and never from those before it.
LAYERS = [
    "cli",
    "bench",
    "server",
    "compress",
    "llm",
    "generate",
    "client",
    "engine",
    "backends",
    "models",
    "program",
    "checkpoint",
    "errors",
    "process",
]
# Usable from engine upward.
BESIDE = {"text": {"checkpoint", "errors", "sandbox"}, "sandbox": {"errors", "process"}}
MODULES = sorted(SOURCE.rglob("*.py"))


def room(parts: tuple[str, ...]) -> str:
    return parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("octavo."):
            rooms.add(room(tuple(node.module.split(".")[1:])))
        elif isinstance(node, ast.ImportFrom) and node.module == "octavo":
            rooms |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            rooms |= {
                room(tuple(a.name.split(".")[1:]))
                for a in node.names
                if a.name.startswith("octavo.")
            }
    return rooms


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_downward(path: Path) -> None:
    own = room(path.relative_to(SOURCE).parts)
    if own == "__init__":
        return
    for other in imported(path) - {own, "_native"}:
        if own in BESIDE:
            assert other in BESIDE[own]
        elif other in BESIDE:
            assert LAYERS.index(own) <= LAYERS.index("engine")
        else:
            assert LAYERS.index(own) < LAYERS.index(other), f"{own} imports {other}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_small_files_and_functions(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            assert node.end_lineno - node.lineno < 60, node.name


def test_core_does_not_import_heavy_packages() -> None:
    heavy = {"torch", "transformers", "pydantic", "fastapi", "gguf", "safetensors"}
    for path in MODULES:
        if "torch" in path.relative_to(SOURCE).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += (
                [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            )
            assert not heavy & {n.split(".")[0] for n in names}, path


def test_nothing_unpickles_or_evaluates() -> None:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {a.name for a in node.names} | {getattr(node, "module", "") or ""}
                assert not names & {"pickle", "marshal", "shelve", "dill", "yaml"}
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec")


def test_children_do_not_import_from_the_current_folder() -> None:
    """`python -m` would; octavo/process.py is where its command line is made."""
    for path in MODULES:
        if path.name != "process.py":
            constants = {
                getattr(node, "value", None) for node in ast.walk(ast.parse(path.read_text()))
            }
            assert "-m" not in constants, path
