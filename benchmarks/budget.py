"""The mixes that `octavo quantize --budget` finds, against rules of thumb with as many bytes.

    python benchmarks/budget.py MODEL.gguf --work /tmp/mixes --json out.json

Each rule of thumb is made into a file; the search then gets that file's size as its budget. KL is
the mean on the evaluation part of Python's manual, of the files as they lie on the disk.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from octavo.checkpoint import Checkpoint, open_checkpoint
from octavo.compress.data import split, token_blocks
from octavo.compress.distributions import rows_at_once
from octavo.compress.quantize import job_of
from octavo.compress.recipe_file import find_recipe, read_recipe
from octavo.compress.recipes import Recipe
from octavo.compress.search import Budget, search
from octavo.compress.sensitivity import Reference, opened
from octavo.engine.host import usable_threads
from octavo.text.tokenizer import load_tokenizer

LENGTH = 128
ENDS = 2  # first and last layers that head and tail keep at 8 bits
UNIFORM = "formats: [gguf]\nfile_type: 1024\nweights: {kind}\n"
HEAD_AND_TAIL = """\
formats: [gguf]
file_type: 1024
weights: IQ4_NL
layers:
  - match: [{layers}]
    weights: Q8_0
"""
HEADER = "| rule of thumb | MB | its KL | MB, by search | KL promised | KL measured | minutes |\n"


def rules(checkpoint: Checkpoint) -> dict[str, Recipe]:
    """Rules of thumb by name."""
    count = int(checkpoint.metadata[f"{checkpoint.architecture}.block_count"])
    ends = [*range(ENDS), *range(count - ENDS, count)]
    layers = ", ".join(["output.weight", *(f"blk.{i}.*" for i in ends)])
    return {
        "every matrix Q4_0": read_recipe(UNIFORM.format(kind="Q4_0"), "uniform"),
        "every matrix Q5_0": read_recipe(UNIFORM.format(kind="Q5_0"), "uniform"),
        "`iq4_nl`": find_recipe("iq4_nl"),
        "`q4_k_m`": find_recipe("q4_k_m"),
        "IQ4_NL, ends and head Q8_0": read_recipe(HEAD_AND_TAIL.format(layers=layers), "ends"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    source = open_checkpoint(args.model)
    blocks = token_blocks(
        split("evaluation"), load_tokenizer(source), LENGTH, args.tokens // LENGTH
    )
    rows = rows_at_once(opened(source).vocabulary)
    reference = Reference.of(source, blocks, rows, usable_threads())
    lines, found = HEADER + "|---|---|---|---|---|---|---|\n", []
    for i, (name, recipe) in enumerate(rules(source).items()):
        thumb, ours = args.work / f"rule-{i}.gguf", args.work / f"mix-{i}.gguf"
        if not thumb.exists():
            job_of(source, recipe, thumb).run()
        size, begin = thumb.stat().st_size, time.perf_counter()
        mix = search(source, Budget(size), ours)
        minutes = (time.perf_counter() - begin) / 60
        theirs, measured = (reference.kl(open_checkpoint(p)) for p in (thumb, ours))
        taken = ours.stat().st_size
        found.append((name, size, theirs, taken, mix.chosen.kl, measured, minutes))
        line = (
            f"| {name} | {size / 1e6:.1f} | {theirs:.4f} | {taken / 1e6:.1f} | "
            f"{mix.chosen.kl:.4f} | {measured:.4f} | {minutes:.1f} |\n"
        )
        print(line, end="", flush=True)
        lines += line
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))
        ours.unlink()
    print(lines)


if __name__ == "__main__":
    main()
