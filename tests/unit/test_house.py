"""Rules of the house: imports go downward, files and functions stay small."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from octavo.models import ARCHITECTURES

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "octavo"

# Each room may import from those after it in its row, and never from those before it.
LAYERS = [
    "cli",
    "bench",
    "gateway",
    "simulate",
    "server",
    "experiments",
    "release",
    "compress",
    "llm",
    "generate",
    "client",
    "engine",
    "backends",
    "models",
    "program",
    "checkpoint",
    "database",
    "yaml_file",
    "errors",
    "process",
]
# Usable from engine upward; what images are, from models.
BESIDE = {
    "text": {"checkpoint", "errors", "sandbox"},
    "vision": {"checkpoint", "errors", "text"},
    "sandbox": {"errors", "process"},
    "balance": set(),
}
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
    for other in imported(path) - {own, "_native", "__version__"}:
        if own in BESIDE:
            assert other in BESIDE[own]
        elif other in BESIDE:
            lowest = "models" if other == "vision" else "engine"
            assert LAYERS.index(own) <= LAYERS.index(lowest)
        else:
            assert LAYERS.index(own) < LAYERS.index(other), f"{own} imports {other}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_small_files_and_functions(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            assert node.end_lineno - node.lineno < 60, node.name


def test_a_class_name_means_one_thing() -> None:
    """But for what APIs call the parts of their bodies and replies."""
    homes: dict[str, list[str]] = {}
    for path in MODULES:
        parts = path.relative_to(SOURCE).parts
        if parts[:2] in (("server", "dialects"), ("server", "replies.py")):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append("/".join(parts))
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_core_does_not_import_heavy_packages() -> None:
    heavy = {"torch", "transformers", "pydantic", "fastapi", "gguf", "safetensors"}
    for path in MODULES:
        if {"torch", "cuda"} & set(path.relative_to(SOURCE).parts):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += (
                [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            )
            assert not heavy & {n.split(".")[0] for n in names}, path


def test_a_front_imports_no_engine_and_no_families() -> None:
    """A server is ready sooner: an engine's process imports them, those of its model only."""
    imports = "import sys, octavo.cli.served, octavo.server.run, octavo.server.app"
    code = f"{imports}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert {"octavo.server.app", "octavo.engine.plan", "octavo.models.registry"} <= modules
    assert not modules & {
        "octavo.engine.engine",
        "octavo.engine.scheduler",
        "octavo.client.replicas",
    }
    assert not modules & {f"octavo.models.{family}" for family in ARCHITECTURES.values()}


def test_nothing_unpickles_or_evaluates() -> None:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {a.name for a in node.names} | {getattr(node, "module", "") or ""}
                assert not names & {"pickle", "marshal", "shelve", "dill"}
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec")
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "yaml":
                assert "load" not in node.attr.lower() or node.attr == "SafeLoader"


def test_children_do_not_import_from_the_current_folder() -> None:
    """`python -m` would; octavo/process.py is where its command line is made."""
    for path in MODULES:
        if path.name != "process.py":
            constants = {
                getattr(node, "value", None) for node in ast.walk(ast.parse(path.read_text()))
            }
            assert "-m" not in constants, path


ABOVE_BACKENDS = [
    path
    for path in MODULES
    if room(path.relative_to(SOURCE).parts)
    in ("cli", "server", "llm", "generate", "client", "engine")
]


@pytest.mark.parametrize("path", ABOVE_BACKENDS, ids=lambda p: str(p.relative_to(SOURCE)))
def test_backends_are_reached_through_their_interface(path: Path) -> None:
    """No room above knows a backend by name, or native code; `bench` measures both."""
    for name in full_names(path):
        assert name != "octavo._native", path
        assert not name.startswith(
            tuple(f"octavo.backends.{b}" for b in ("cpu", "cuda", "torch"))
        ), path


@pytest.mark.parametrize("folder", ["bench", "server", "generate"])
def test_engines_are_used_through_clients(folder: str) -> None:
    """Who steps an engine is its client; the others, `llm.py` too, submit requests and read events."""
    for path in [*(SOURCE / folder).rglob("*.py"), SOURCE / "llm.py"]:
        assert not {n for n in full_names(path) if n.startswith(("octavo.engine.engine", "octavo.engine.scheduler"))}, path  # fmt: skip
        assert "octavo.engine.Engine" not in full_names(path), path


def full_names(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it, and every name it takes from one."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
    return names


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports for type checkers count too: who needs a type depends on its module."""
    names = {".".join(p.relative_to(SOURCE.parent).with_suffix("").parts): p for p in MODULES}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    graph = {
        name: {n for n in full_names(path) if n in names} - {name, "octavo"}
        for name, path in names.items()
    }
    for name, imports in graph.items():  # `from octavo.a import b` is of b, if that is a module
        packages = {i.rpartition(".")[0] for i in imports}
        graph[name] = {i for i in imports if i not in packages}
    assert list(TopologicalSorter(graph).static_order())


def test_recording_has_one_meaning() -> None:
    """`Recorder` writes native models, `Recorded` knows which keys of a checkpoint were read."""
    classes = [n for p in MODULES for n in ast.walk(ast.parse(p.read_text())) if isinstance(n, ast.ClassDef)]  # fmt: skip
    assert sorted(c.name for c in classes if c.name.startswith("Record")) == ["Recorded", "Recorder"]  # fmt: skip


DIALECTS = sorted((SOURCE / "server" / "dialects").rglob("*.py"))


@pytest.mark.parametrize("path", DIALECTS, ids=lambda p: str(p.relative_to(SOURCE)))
def test_dialects_only_translate(path: Path) -> None:
    """Nothing in them runs a request, waits for one, or knows of HTTP."""
    runs = ("asyncio", "starlette", "uvicorn", "octavo.client", "octavo.engine.engine")
    runs += tuple(f"octavo.server.{m}" for m in ("runner", "app", "http", "exchange", "registry"))
    assert not [name for name in full_names(path) if name.startswith(runs)]


def test_the_server_knows_dialects_only_by_their_table() -> None:
    for path in set(MODULES) - set(DIALECTS):
        assert not [n for n in full_names(path) if n.startswith("octavo.server.dialects.openai")]


@pytest.mark.parametrize("page", ["design.md", "internals.md"])
def test_pages_name_files_that_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    named = set(re.findall(r"`((?:\w+/)*[\w*]+\.(?:py|h|cpp|inc))`", text))
    assert len(named) > 20
    assert [n for n in named if not (any(ROOT.glob(n)) or any(SOURCE.rglob(n)) or any((ROOT / "native").rglob(n)))] == []  # fmt: skip


NATIVE = sorted(p for p in (ROOT / "native").rglob("*.*") if p.suffix in (".h", ".cpp", ".inc"))


@pytest.mark.parametrize("path", NATIVE, ids=lambda p: p.name)
def test_native_files_are_small_and_narrow(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 400
    assert [n for n, line in enumerate(lines, 1) if len(line) > 100] == []
