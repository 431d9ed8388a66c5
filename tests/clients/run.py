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

PYTHON = (
    "openai", "anthropic", "ollama", "litellm", "langchain", "instructor", "pydantic_ai", "llama_index"
)  # fmt: skip
SOON = 3.0  # seconds, in which a request ends whose client has left; all of it takes longer
HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "clients.md"


def post(url: str, path: str, body: Any) -> Any:
    request = urllib.request.Request(url + path, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def wait_idle(url: str) -> float:
    """Waits until nothing runs; the seconds that takes."""
    began = time.monotonic()
    while True:
        with urllib.request.urlopen(url + "/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        running = [line for line in lines if line.startswith("octavo_requests_running{")]
        if running and all(line.endswith(" 0.0") for line in running):
            return time.monotonic() - began
        assert time.monotonic() < began + 120, running
        time.sleep(0.05)


def python(url: str, name: str) -> dict[str, Any]:
    module = importlib.import_module(f"tests.clients.with_{name}")
    made = {}
    for what in ASKED:
        if (ask := getattr(module, what, None)) is not None:
            try:
                made[what] = ask(url)
            except Exception as e:
                made[what] = e
            if (seconds := wait_idle(url)) > SOON:
                made[what] = f"its request went on for {seconds:.1f} s"
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


def right(what: str, answer: Any, text: str, vector: list[float]) -> bool:
    """Whether an answer is the server's."""
    match what:
        case "chat" | "stream":
            return bool(answer == text)
        case "tool" | "structured":
            return answer in ({"city": "Paris"}, {"city": "Rome"})
        case "embeddings" if isinstance(answer, list):
            size = math.sqrt(sum(x * x for x in answer))  # some are of length 1, some are not
            return max(abs(a / size - b) for a, b in zip(answer, vector, strict=True)) < 1e-5
        case "error" if isinstance(answer, str):
            return "no model 'nobody' here" in answer
    return what == "abort" and answer is None


def main() -> None:
    url, modules = sys.argv[1], Path(sys.argv[2])
    asked = {"model": "smollm2", "messages": HI, **SHORT}
    text = post(url, "/v1/chat/completions", asked)["choices"][0]["message"]["content"]
    (vector,) = post(url, "/api/embed", {"model": "smollm2", "input": "a king"})["embeddings"]
    answers = {name: python(url, name) for name in PYTHON} | javascript(url, modules)
    wrong = []
    table = [f"| client | {' | '.join(ASKED)} |", "|---" * (len(ASKED) + 1) + "|"]
    for name, made in answers.items():
        wrong += [(name, w, a) for w, a in made.items() if not right(w, a, text, vector)]
        table.append(f"| {name} | {' | '.join('✓' if what in made else '—' for what in ASKED)} |")
    print("\n".join(table))
    for name, what, answer in wrong:
        print(f"{name}, {what}: {str(answer)[:500]!r}", file=sys.stderr)
    told = "\n".join(table) in PAGE.read_text()
    if not told:
        print("docs/clients.md has another table", file=sys.stderr)
    sys.exit(bool(wrong) or not told)


if __name__ == "__main__":
    main()
