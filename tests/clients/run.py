"""Asks a server through every client library, and compares with what it says without one.

Arguments: the server's address and a folder with node_modules. Prints the table that
docs/clients.md has.
"""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.clients import ASKED, HI, SHORT

PYTHON = ("openai", "litellm", "langchain", "instructor", "pydantic_ai", "llama_index")
HERE = Path(__file__).parent


def post(url: str, path: str, body: Any) -> Any:
    request = urllib.request.Request(url + path, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def wait_idle(url: str) -> None:
    """Until the request whose client has left has ended."""
    deadline = time.monotonic() + 5
    while True:
        with urllib.request.urlopen(url + "/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        running = [line for line in lines if line.startswith("octavo_requests_running{")]
        if running and all(line.endswith(" 0.0") for line in running):
            return
        assert time.monotonic() < deadline, running
        time.sleep(0.05)


def python(url: str, name: str) -> dict[str, Any]:
    module = importlib.import_module(f"tests.clients.with_{name}")
    made = {}
    for what in ASKED:
        if (ask := getattr(module, what, None)) is not None:
            made[what] = ask(url)
            wait_idle(url)
    return made


def javascript(url: str, modules: Path) -> dict[str, dict[str, Any]]:
    """What the libraries of npm were answered. Imports are looked up where the script lies."""
    script = modules / "clients.mjs"
    script.write_text((HERE / "clients.mjs").read_text())
    done = subprocess.run(
        ["node", script, url], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    wait_idle(url)
    return {f"{name} (npm)": made for name, made in json.loads(done.stdout).items()}


def verify(made: dict[str, Any], text: str, vector: list[float]) -> None:
    """Raises AssertionError for an answer that is not the server's."""
    for what, answer in made.items():
        match what:
            case "chat" | "stream":
                assert answer == text, (what, answer)
            case "tool" | "structured":
                assert answer in ({"city": "Paris"}, {"city": "Rome"}), (what, answer)
            case "embeddings":
                size = math.sqrt(sum(x * x for x in answer))  # some are of length 1, some are not
                assert max(abs(a / size - b) for a, b in zip(answer, vector, strict=True)) < 1e-5
            case "error":
                assert "no model 'nobody' here" in answer, answer
            case "abort":
                assert answer is None


def main() -> None:
    url, modules = sys.argv[1], Path(sys.argv[2])
    asked = {"model": "smollm2", "messages": HI, **SHORT}
    text = post(url, "/v1/chat/completions", asked)["choices"][0]["message"]["content"]
    (vector,) = post(url, "/api/embed", {"model": "smollm2", "input": "a king"})["embeddings"]
    answers = {name: python(url, name) for name in PYTHON} | javascript(url, modules)
    print(f"| client | {' | '.join(ASKED)} |")
    print("|---" * (len(ASKED) + 1) + "|")
    for name, made in answers.items():
        verify(made, text, vector)
        cells = ["✓" if what in made else "—" for what in ASKED]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
