"""What each recipe makes of a model: its size, what it has lost, and how long that took.

    python benchmarks/compress.py FOLDER --work /tmp/small --json out.json \
        --recipes rtn-4 awq-4 gptq-4 healed-4 distilled-4 --update docs/compression.md

Makes a model under --work for each recipe, unless it is there already, and measures it against FOLDER
on text that it was not calibrated with. --peer adds what llm-compressor makes with the same tokens
(installed under --work; reported with the reason where it cannot be). --update puts the table where
a Markdown file has `<!-- compare NAME -->` and `<!-- end -->`, NAME being the folder's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from compare import update

import octavo
from octavo.checkpoint import open_checkpoint
from octavo.compress import calibrated
from octavo.compress.data import split, token_blocks
from octavo.text.tokenizer import load_tokenizer

PEER = Path(__file__).parent / "peers" / "llm_compressor.py"
PACKAGES = ["torch==2.13.0", "llmcompressor"]
HEADER = """\
| | MB | minutes | NLL lost | of rounding's loss | KL | same first token |
|---|---|---|---|---|---|---|
"""


def made(model: Path, recipe: str, work: Path) -> tuple[Path, float]:
    """The folder that a recipe makes, and the minutes that took, 0 where it was there."""
    output = work / recipe
    if output.exists():
        return output, 0.0
    begin = time.perf_counter()
    octavo.quantize(model, recipe=recipe, output=output)
    return output, (time.perf_counter() - begin) / 60


def made_by_peer(model: Path, method: str, work: Path) -> tuple[Path, float]:
    """The same by llm-compressor. Raises RuntimeError with what it says."""
    output, python = work / f"llm-compressor-{method}", work / "llm-compressor" / "bin" / "python"
    if output.exists():
        return output, 0.0
    if not python.exists():
        run([sys.executable, "-m", "venv", str(python.parents[1])])
        for package in PACKAGES:
            run([str(python), "-m", "pip", "install", "-q", package])
    tokenizer = load_tokenizer(open_checkpoint(model))
    blocks = token_blocks(split("calibration"), tokenizer, calibrated.LENGTH, calibrated.SEQUENCES)
    tokens = work / "tokens.json"
    tokens.write_text(json.dumps(blocks.tolist()))
    begin = time.perf_counter()
    run([str(python), "-I", str(PEER), str(model), method, str(tokens), str(output)])
    for file in model.glob("*token*.json"):
        shutil.copy(file, output)
    return output, (time.perf_counter() - begin) / 60


def run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1][:200])


def table(results: dict[str, dict[str, float]]) -> str:
    """Markdown; the share of rounding's loss where it was measured."""
    plain = results.get("rtn-4", {}).get("nll_lost")
    lines = []
    for name, r in results.items():
        share = f"{r['nll_lost'] / plain:.0%}" if plain else ""
        error = f"{r['nll_lost']:+.4f} ± {r['nll_error']:.4f}"
        lines.append(
            f"| {name} | {r['bytes'] / 1e6:.0f} | {r['minutes']:.1f} | {error} | {share} | "
            f"{r['kl']:.4f} | {r['top1']:.1%} |\n"
        )
    return HEADER + "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--recipes", nargs="+", default=["rtn-4", "awq-4", "gptq-4", "healed-4"])
    parser.add_argument("--peer", nargs="*", default=[], choices=["gptq", "awq"])
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--sequences", type=int, default=calibrated.SEQUENCES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--update", type=Path)
    args = parser.parse_args()
    calibrated.SEQUENCES = args.sequences
    args.work.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, float]] = {}
    jobs = [(r, made, r) for r in args.recipes]
    jobs += [(f"llm-compressor {m}", made_by_peer, m) for m in args.peer]
    for name, make, what in jobs:
        try:
            output, minutes = make(args.model, what, args.work)
        except RuntimeError as e:
            print(f"{name}: {e}", file=sys.stderr)
            continue
        found = octavo.evaluate(str(output), against=str(args.model), tokens=args.tokens)
        figures = asdict(found.summary)
        results[name] = {
            "bytes": figures["bytes"]["a"], "minutes": minutes, "kl": found.kl_mean,
            "nll_lost": found.nll.difference, "nll_error": found.nll.standard_error,
            "top1": found.top1,
        }  # fmt: skip
        print(name, results[name], flush=True)
    print(table(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    if args.update:
        update(args.update, args.model.name, table(results))


if __name__ == "__main__":
    main()
