"""Every file under examples/ runs, against a real server where it needs one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.api.server import Server, serving
from tests.parity.test_lora import make_adapter

FOLDER = Path(__file__).parents[2] / "examples"
OVER_HTTP = {
    "chat.sh": r'"content":\s*"The capital of France is Paris',
    "chat.py": r"> What is the capital of France\?\nThe capital of France is Paris.*\n> And of Italy\?\n.+",
    "stream.py": r"(?s)1.*2.*3.*\n\d+ tokens read, \d+ written",
    "json_schema.py": r"^\S.* \d+$",
    "tools.py": r"^18 degrees (celsius|fahrenheit) in \S",
}
IN_PYTHON = {
    "batch.py": r"(?m)\A(.+: .* \[(stop|length)\]\n){4}\Z",
    "threads.py": r"(What is \d plus \d\? .+\n)+[^|]+\|[^|]+",
    "tasks.py": r"(?s).+\n(What is \d plus \d\? [^\n]+\n)+",
    "score.py": r"-\d+\.\d{3} nats in \d+ tokens  The capital of France is Paris\.",
}


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("examples") / "log"
    with serving("smollm2", "--offline", log=log) as server:
        yield server


def run(name: str, *arguments: str, url: str = "http://127.0.0.1:9") -> str:
    path = FOLDER / name
    program = ["sh"] if path.suffix == ".sh" else [sys.executable]
    result = subprocess.run(
        [*program, str(path), *arguments], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "OCTAVO_SERVER": url},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("name", OVER_HTTP)
def test_over_http(server: Server, name: str) -> None:
    assert re.search(OVER_HTTP[name], run(name, url=server.url))


@pytest.mark.parametrize("name", IN_PYTHON)
def test_in_python(smollm2: Path, name: str) -> None:
    assert re.search(IN_PYTHON[name], run(name))


def test_likelier_texts_score_higher(smollm2: Path) -> None:
    paris, cheese = (float(line.split()[0]) for line in run("score.py").splitlines())
    assert paris > cheese


def test_search(minilm: Path, tmp_path: Path) -> None:
    with serving(str(minilm), "--name", "minilm", log=tmp_path / "log") as server:
        first, *others = run("search.py", "minilm", url=server.url).splitlines()
    assert first.endswith("The Seine flows through Paris.") and len(others) == 2


def test_adapter(smollm2: Path, tmp_path: Path) -> None:
    make_adapter(
        tmp_path / "mine", 1, rank=16, layers=30, dtype=torch.bfloat16,
        modules={"self_attn.q_proj": (576, 576), "mlp.down_proj": (1536, 576)},
    )  # fmt: skip
    plain, adapted = run("adapter.py", str(tmp_path / "mine")).split("\nadapter: ")
    assert plain.startswith("model:   ") and plain[9:] != adapted.strip()


def test_scenes(tmp_path: Path) -> None:
    """Drawings, and what is asked about each."""
    lines = run("tiny_vlm/scenes.py", "3", str(tmp_path)).splitlines()
    drawn = [line.split(": ")[0] for line in lines]
    assert sorted(drawn) == sorted(p.name for p in tmp_path.iterdir()) and len(drawn) == 3
    assert all(len(line.split(": ")[1].split()) > 2 for line in lines)


def test_every_example_is_run_and_told() -> None:
    told = set(re.findall(r"\]\((\S+)\)", (FOLDER / "README.md").read_text()))
    files = {p.name for p in FOLDER.iterdir() if p.suffix in (".py", ".sh")}
    scripts = {*OVER_HTTP, *IN_PYTHON, "search.py", "adapter.py"}
    assert files == scripts and told == scripts | {"tiny_vlm/README.md"}
