"""Drafts of Octavo and llama.cpp on the same texts: tokens a step, acceptance, speed-up.

    python benchmarks/speculation.py MODEL.gguf --work /tmp/peers --cases copy,edit,digits
    python benchmarks/speculation.py MODEL.gguf --work /tmp/peers --draft SMALL.gguf
    python benchmarks/speculation.py MODEL.gguf --work /tmp/peers --vllm

llama.cpp's programs `llama-speculative-simple` and `llama-lookup` are built from the source that
llama-cpp-python brings, under --work (kept for the next time). All programs take turns in each
round, greedy, with the same prompts and as many tokens. Speed is that after the prompt; a speed-up
is the median over rounds of a program's ratio with and without drafts, of itself. vLLM (installed
under --work, too) takes its rounds before the others; its weights are those of the file in bf16.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from octavo.bench.speculation import CASES, CUE, Case, bench_speculation
from octavo.checkpoint import open_checkpoint
from octavo.text import ChatTemplate, load_tokenizer
from octavo.text.chat import template_source
from octavo.text.messages import message

SIMPLE, LOOKUP = "llama-speculative-simple", "llama-lookup"
CONTEXT = "2048"
# llama.cpp's ways to draft. Without drafts: n-grams so long that none is found, since this program
# does not run without any way.
NGRAM = ("--spec-type", "ngram-simple")
NEVER = (SIMPLE, (*NGRAM, "--spec-ngram-simple-size-n", "1024"))
WAYS = {
    "llama.cpp n-gram": (SIMPLE, NGRAM),
    "llama.cpp n-gram of 3, 8 tokens": (
        SIMPLE,
        (*NGRAM, "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8"),
    ),
    "llama.cpp lookup": (LOOKUP, ("--spec-draft-n-max", "8")),
}


class Run(NamedTuple):
    """tps: tokens a second after the prompt. gain: those by those without drafts. step: tokens of a
    step. drafted, accepted: tokens."""

    tps: float
    gain: float
    step: float
    drafted: int
    accepted: int


def build(work: Path) -> Path:
    """The folder of llama.cpp's programs."""
    source = work / "llama.cpp"
    programs = source / "build" / "bin"
    if (programs / LOOKUP).exists():
        return programs
    tools = work / "tools"
    subprocess.run([sys.executable, "-m", "venv", tools], check=True)
    pip = [tools / "bin" / "python", "-m", "pip"]
    subprocess.run([*pip, "install", "--quiet", "scikit-build-core", "cmake", "ninja"], check=True)
    wanted = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:", "llama-cpp-python"]
    subprocess.run([*pip, "download", "--quiet", "--dest", work, *wanted], check=True)
    (archive,) = work.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(work, filter="data")
    (work / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp").rename(source)
    options = ["LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_TOOLS=OFF", "LLAMA_OPENSSL=OFF"]
    flags = [f"-D{o}" for o in ("CMAKE_BUILD_TYPE=Release", *options)]
    cmake = tools / "bin" / "cmake"
    environment = {"PATH": f"{tools / 'bin'}:/usr/bin:/bin"}
    made = [cmake, "-B", source / "build", "-S", source, "-G", "Ninja", *flags]
    subprocess.run(made, check=True, env=environment, stdout=subprocess.DEVNULL)
    made = [cmake, "--build", source / "build", "--target", SIMPLE, LOOKUP]
    subprocess.run(made, check=True, env=environment, stdout=subprocess.DEVNULL)
    return programs


def written(output: str) -> tuple[float, int, int, int]:
    """What a program of llama.cpp says of itself: seconds, and tokens written, drafted, accepted."""
    found = re.search(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds", output)
    drafts = [re.search(rf"n_{name}\s*= (\d+)", output) for name in ("drafted", "accept")]
    if found is None or None in drafts:
        raise ValueError("llama.cpp has printed no times")
    drafted, accepted = (int(d[1]) for d in drafts if d is not None)
    return float(found[2]), int(found[1]), drafted, accepted


def llama_cpp(
    programs: Path, model: str, threads: int, case: Case, prompt: Path,
    ways: dict[str, tuple[str, tuple[str, ...]]],
) -> dict[str, Run]:  # fmt: skip
    """A round of its ways to draft; the one without comes first."""
    speeds: dict[str, Run] = {}
    for name, (program, options) in {"llama.cpp": NEVER, **ways}.items():
        command = [
            programs / program, "-m", model, "-t", str(threads), "-c", CONTEXT, "-n",
            str(case.tokens), "--temp", "0", "--ignore-eos", "-f", prompt, *options,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds, tokens, drafted, accepted = written(done.stdout + done.stderr)
        plain = speeds["llama.cpp"].tps if speeds else tokens / seconds
        step = tokens / (tokens - accepted)
        speeds[name] = Run(tokens / seconds, tokens / seconds / plain, step, drafted, accepted)
    return speeds


def octavo(model: str, threads: int, case: Case, draft: Path | None) -> dict[str, Run]:
    """A round of Octavo's, which says itself if a text differs."""
    found = {}
    ways: dict[str, Path | None] = {"octavo": None}
    if draft is not None:
        ways["octavo, draft model"] = draft
    for name, small in ways.items():
        (s,), _ = bench_speculation(Path(model), "", threads, 1, [case], "auto", small)
        found[name] = Run(s.tps[1], s.writing, s.step, s.drafted, s.accepted)
    return found


def vllm(
    work: Path, model: str, threads: int, rounds: int, asked: dict[str, tuple[list[int], int]]
) -> dict[str, list[dict[str, Run]]]:
    """Its rounds by case. asked: ids of the prompt, and tokens to write."""
    from compare import HERE, install

    python, problem = install("vllm", work)
    if problem:
        print(f"no vLLM: {problem}")
        return {name: [] for name in asked}
    script = HERE / "peers" / "vllm_ngram.py"
    command = [python, script, model, str(threads), str(rounds), json.dumps(asked)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: [vllm_round(r) for r in given] for name, given in found.items()}


def vllm_round(given: dict[str, list[float]]) -> dict[str, Run]:
    """Of a round's seconds, tokens, and tokens drafted and accepted, by way; without comes first."""
    out: dict[str, Run] = {}
    for way, (seconds, tokens, drafted, accepted) in given.items():
        tps = tokens / seconds
        plain = out["vLLM"].tps if out else tps
        step = tokens / (tokens - accepted)
        out[way] = Run(tps, tps / plain, step, int(drafted), int(accepted))
    return out


def prompts(model: str, cases: list[Case]) -> dict[str, tuple[str, list[int]]]:
    """By case: the text that all programs continue, and its ids."""
    checkpoint = open_checkpoint(Path(model))
    tokenizer = load_tokenizer(checkpoint)
    if (source := template_source(checkpoint)) is None:
        return {c.name: (c.text + CUE, tokenizer.encode(c.text + CUE)) for c in cases}
    template = ChatTemplate(source, tokenizer)
    try:
        out = {}
        for c in cases:
            said = [message("user", c.text)]
            ids = template.encode(said, (), {}, generation=True, continued=False)
            out[c.name] = template.render(said), ids
        return out
    finally:
        template.close()


def summary(rounds: list[dict[str, Run]]) -> list[str]:
    """A row of a Markdown table for each program."""
    out = []
    for name in rounds[0]:
        runs = [r[name] for r in rounds]
        tps, gain, step = (
            statistics.median(column) for column in list(zip(*runs, strict=True))[:3]
        )
        drafted, accepted = (sum(column) for column in list(zip(*runs, strict=True))[3:])
        share = f"{accepted / drafted:.0%} of {drafted:,}" if drafted else "none drafted"
        out.append(f"| {name} | {tps:.0f} | {gain:.2f} | {step:.2f} | {share} |")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--work", type=Path, required=True, help="folder of llama.cpp")
    parser.add_argument("--draft", type=Path, help="a smaller model of the same vocabulary")
    parser.add_argument(
        "--cases", default="copy,edit,summary,table edit,chat", help="kinds of text"
    )
    parser.add_argument("--vllm", action="store_true", help="vLLM's n-gram mode, too")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    names = a.cases.split(",")
    cases = [replace(c, temperature=0.0) for c in CASES if c.name in names]
    a.work.mkdir(parents=True, exist_ok=True)
    programs, texts = build(a.work), prompts(a.model, cases)
    ways = dict(WAYS)
    if a.draft:
        ways["llama.cpp draft model"] = (
            SIMPLE,
            ("-md", str(a.draft), "--spec-type", "draft-simple"),
        )
    others: dict[str, list[dict[str, Run]]] = {}
    if a.vllm:
        asked = {c.name: (texts[c.name][1], c.tokens) for c in cases}
        others = vllm(a.work, a.model, a.threads, a.rounds, asked)
    for case in cases:
        rounds = []
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as prompt:
            prompt.write(texts[case.name][0] + "\n")  # of which llama.cpp takes a line's end away
            prompt.flush()
            for _ in range(a.rounds):
                peer = llama_cpp(programs, a.model, a.threads, case, Path(prompt.name), ways)
                rounds.append(octavo(a.model, a.threads, case, a.draft) | peer)
        print(
            f"\n{case.name}\n\n| | tokens/s | speed-up | tokens a step | accepted |\n|---|---|---|---|---|"
        )
        rows = summary(rounds) + (summary(others[case.name]) if others.get(case.name) else [])
        print("\n".join(rows), flush=True)


if __name__ == "__main__":
    main()
