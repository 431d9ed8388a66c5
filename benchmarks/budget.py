"""The mixes that `octavo quantize --budget` finds, against rules of thumb with as many bytes.

    python benchmarks/budget.py MODEL.gguf --work /tmp/mixes --json out.json
    python benchmarks/budget.py MODEL.gguf --work /tmp/mixes --types Q4_0 Q5_0 Q8_0

The search gets as many bytes as each rule of thumb takes. KL is the mean on the evaluation part of
Python's manual; that of the search's file is measured again, as it lies on the disk. --types: of
matrices whose rows 256 does not divide. What is encoded stays under --work.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

from octavo.checkpoint import Checkpoint, open_checkpoint
from octavo.checkpoint.base import TensorType
from octavo.cli.screen import step_bar
from octavo.compress import search, sensitivity
from octavo.compress.data import split, token_blocks
from octavo.compress.distributions import rows_at_once
from octavo.compress.recipe_file import read_recipe
from octavo.compress.recipes import GgufRecipe
from octavo.compress.search import Budget, Search
from octavo.compress.sensitivity import Encoded, ReferenceLogits, matrices, opened
from octavo.engine.host import usable_threads
from octavo.text.tokenizer import load_tokenizer

LENGTH = 128
ENDS = 2  # first and last layers that head and tail keep at 8 bits
UNIFORM = "formats: [gguf]\nfile_type: 1024\nweights: Q4_0\n"
HEAD_AND_TAIL = """\
formats: [gguf]
file_type: 1024
weights: {kind}
layers:
  - match: [{layers}]
    weights: Q8_0
"""
HEADER = "| rule of thumb | MB | its KL | MB, by search | KL promised | KL measured | minutes |\n"


def rules(checkpoint: Checkpoint, kind: str) -> dict[str, GgufRecipe]:
    """Rules of thumb by name."""
    count = int(checkpoint.metadata[f"{checkpoint.architecture}.block_count"])
    ends = [*range(ENDS), *range(count - ENDS, count)]
    layers = ", ".join(["output.weight", *(f"blk.{i}.*" for i in ends)])
    found = {
        f"{kind}, ends and head Q8_0": read_recipe(
            HEAD_AND_TAIL.format(kind=kind, layers=layers), "ends"
        ),
        "every matrix Q4_0": read_recipe(UNIFORM, "uniform"),
    }
    return {n: r for n, r in found.items() if isinstance(r, GgufRecipe)}


def types(checkpoint: Checkpoint, recipe: GgufRecipe) -> dict[str, TensorType]:
    """What a recipe makes of the matrices that a search could change."""
    layers = int(checkpoint.metadata[f"{checkpoint.architecture}.block_count"])
    tied = "output.weight" not in checkpoint.tensors
    found = matrices(checkpoint).items()
    return {n: recipe.type_of(n, t.shape, layers, tied) for n, t in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--types", nargs="+", default=[k.name for k in sensitivity.NARROW])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    search.POINTS = 0  # only the mix that is chosen
    search.CHECKED = args.tokens // LENGTH
    sensitivity.NARROW = tuple(TensorType[name] for name in args.types)
    source, encoded = open_checkpoint(args.model), Encoded(args.work)
    blocks = token_blocks(
        split("evaluation"), load_tokenizer(source), LENGTH, args.tokens // LENGTH
    )
    rows, threads = rows_at_once(opened(source).vocabulary), usable_threads()
    reference = ReferenceLogits.of(source, blocks, rows, threads)
    lines, found = HEADER + "|---|---|---|---|---|---|---|\n", []
    for name, recipe in rules(source, args.types[0]).items():
        begin = time.perf_counter()
        rule = encoded.mixed(source, types(source, recipe))
        theirs, ours = reference.kl(rule), args.work / "mix.gguf"
        job = Search(source, Budget(0), ours, threads)
        size = job.fixed + sum(rule.tensors[n].nbytes for n in matrices(source))
        mix = replace(job, budget=Budget(size)).run(encoded, None, step_bar)
        minutes = (time.perf_counter() - begin) / 60
        measured, taken = reference.kl(open_checkpoint(ours)), ours.stat().st_size
        found.append((name, size, theirs, taken, mix.chosen.kl, measured, minutes))
        line = (
            f"| {name} | {size / 1e6:.1f} | {theirs:.4f} | {taken / 1e6:.1f} | "
            f"{mix.chosen.kl:.4f} | {measured:.4f} | {minutes:.1f} |\n"
        )
        print(line, end="", flush=True)
        lines += line
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))
    print(lines)


if __name__ == "__main__":
    main()
