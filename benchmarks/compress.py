"""What each recipe makes of a model: what it loses, its speed and memory, and what that took.

    python benchmarks/compress.py FOLDER --work /tmp/small --json out.json \
        --recipes rtn-4 awq-4 gptq-4 benchmarks/rtn-3.yaml gptq-3 rtn-8 fp8 w8a8 q4_k_m \
        --update docs/compression.md

Makes a model under --work for each recipe, unless it is there already, and measures it against FOLDER
on text that it was not calibrated with. GGUF recipes take FOLDER as a GGUF file. Of layers that take
int8 inputs, losses are computed as config.json says (`int8_inputs.py`), speed and memory as Octavo
serves them, with 16 bits. --peer adds what others make with the same tokens (installed under --work;
reported with the reason where they cannot be): llm-compressor:gptq or :awq, gptqmodel:gptq or :awq,
auto-round:50 (iterations of a block), llama.cpp:Q4_K_M. --also adds models made elsewhere.
What --json holds already is not measured again. --update puts the table where a Markdown file has
`<!-- compare NAME -->` and `<!-- end -->`, NAME being the folder's.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from compare import update
from int8_inputs import lost, steps_of

import octavo
from octavo.checkpoint import open_checkpoint
from octavo.compress import calibrated
from octavo.compress.conversion import Conversion
from octavo.compress.data import split, token_blocks
from octavo.compress.recipe_file import find_recipe
from octavo.compress.recipes import GgufRecipe
from octavo.text.tokenizer import load_tokenizer

HERE = Path(__file__).parent / "peers"
PEERS = {  # name: (script, packages in order of installation)
    "llm-compressor": ("llm_compressor.py", ["torch==2.13.0", "llmcompressor"]),
    "gptqmodel": ("gptqmodel_folder.py", ["torch==2.13.0", "gptqmodel"]),
    "auto-round": ("auto_round_folder.py", ["torch==2.13.0", "auto-round"]),
    "llama.cpp": ("llama_cpp_quantize.py", ["numpy", "llama-cpp-python"]),
}
SPEEDS = ("decoding", "prefill")
HEADER = """\
| | MB | perplexity | NLL lost | of rounding's loss | KL | same top-1 | BLEU-4 | decoding | prefill | peak RSS, MB | CPU minutes |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""


def made(model: Path, recipe: str, work: Path) -> tuple[Path, float]:
    """What a recipe makes, and the minutes of processor time that took."""
    name, found = Path(recipe).stem, find_recipe(recipe)
    output = work / (f"{name}.gguf" if isinstance(found, GgufRecipe) else name)
    minutes = work / f"{name}.minutes"
    if output.exists():
        return output, float(minutes.read_text())
    if isinstance(found, GgufRecipe):
        model = as_gguf(model, work)
    begin = time.process_time()
    octavo.quantize(model, recipe=recipe, output=output)
    minutes.write_text(str((time.process_time() - begin) / 60))
    return output, float(minutes.read_text())


def as_gguf(model: Path, work: Path) -> Path:
    """The folder as a GGUF file."""
    output = work / f"{model.name}.gguf"
    if not output.exists():
        Conversion(open_checkpoint(model), output, "gguf").run()
    return output


def measured(output: Path, model: Path, tokens: int) -> dict[str, float]:
    """The figures of one model."""
    found = octavo.evaluate(str(output), against=str(model), tokens=tokens)
    figures = {
        "bytes": found.bytes.a, "perplexity": found.perplexity.a, "kl": found.kl_mean,
        "nll_lost": found.nll.difference, "nll_error": found.nll.standard_error,
        "top1": found.top1, "bleu4": found.bleu4, "bleu4_error": found.bleu4_error,
        "peak_rss": found.peak_rss.a,
        "decoding": found.decode_tps.a / found.decode_tps.b,
        "prefill": found.prefill_tps.a / found.prefill_tps.b,
    }  # fmt: skip
    if output.is_dir() and steps_of(open_checkpoint(output)):
        held = lost(output, model, tokens)
        figures |= {
            "perplexity": found.perplexity.b * math.exp(held.nll), "kl": held.kl,
            "nll_lost": held.nll, "nll_error": held.nll_error, "top1": held.top1,
        }  # fmt: skip
    return figures


def made_by_peer(model: Path, what: str, work: Path) -> tuple[Path, float]:
    """What a peer makes by a method, given as `peer:method`. Raises RuntimeError with what it says."""
    peer, _, method = what.partition(":")
    script, gguf = str(HERE / PEERS[peer][0]), peer == "llama.cpp"
    output = work / (f"{peer}-{method}.gguf" if gguf else f"{peer}-{method}")
    if output.exists():
        return output, 0.0
    python = str(installed(peer, work))
    begin = children_time()
    if gguf:
        run([python, script, str(as_gguf(model, work)), method, str(output)], work)
    else:
        run([python, script, str(model), method, str(tokens_file(model, work)), str(output)], work)
        for file in model.glob("*token*.json"):
            shutil.copy(file, output)
    return output, (children_time() - begin) / 60


def installed(peer: str, work: Path) -> Path:
    """A peer's python, installed if it is not."""
    python = work / peer / "bin" / "python"
    if not python.exists():
        run([sys.executable, "-m", "venv", str(python.parents[1])])
        for package in PEERS[peer][1]:
            run([str(python), "-m", "pip", "install", "-q", package])
    return python


def tokens_file(model: Path, work: Path) -> Path:
    """The tokens that recipes see, as JSON."""
    tokenizer = load_tokenizer(open_checkpoint(model))
    blocks = token_blocks(split("calibration"), tokenizer, calibrated.LENGTH, calibrated.SEQUENCES)
    output = work / "tokens.json"
    output.write_text(json.dumps(blocks.tolist()))
    return output


def as_given(model: Path, path: str, work: Path) -> tuple[Path, float]:
    """A model made elsewhere."""
    return Path(path), 0.0


def children_time() -> float:
    """Seconds of processor time that processes have taken that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(command: Sequence[str], folder: Path | None = None) -> None:
    """Runs a command in a folder, as some write logs to the one they are in. Raises RuntimeError with
    the last line of what it says."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1][:200])


def table(results: dict[str, dict[str, float]]) -> str:
    """Markdown; the share of rounding's loss where that is more than two errors, and speeds where
    they were measured."""
    lines = []
    for name, r in results.items():
        decoding, prefill = (f"{r[k]:.2f} x" if k in r else "" for k in SPEEDS)
        plain = results.get(f"rtn-{name.rpartition('-')[2]}")
        share = ""
        if plain and plain["nll_lost"] > 2 * plain["nll_error"]:
            share = f"{r['nll_lost'] / plain['nll_lost']:.0%}"
        minutes = f"{r['minutes']:.1f}" if r["minutes"] else ""
        error = f"{r['nll_lost']:+.4f} ± {r['nll_error']:.4f}"
        lines.append(
            f"| {name} | {r['bytes'] / 1e6:.0f} | {r['perplexity']:.3f} | {error} | {share} | "
            f"{r['kl']:.4f} | {r['top1']:.1%} | {r['bleu4']:.1f} ± {r['bleu4_error']:.1f} | "
            f"{decoding} | {prefill} | {r['peak_rss'] / 1e6:.0f} | {minutes} |\n"
        )
    return HEADER + "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--recipes", nargs="+", default=["rtn-4", "awq-4", "gptq-4", "healed-4"])
    parser.add_argument("--peer", nargs="*", default=[], metavar="PEER:METHOD")
    parser.add_argument("--also", nargs="*", default=[], type=Path, help="models made elsewhere")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--sequences", type=int, default=calibrated.SEQUENCES)
    parser.add_argument("--no-speeds", action="store_true", help="of a machine that others use")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--update", type=Path)
    args = parser.parse_args()
    args.model, args.work = args.model.resolve(), args.work.resolve()
    calibrated.SEQUENCES = args.sequences
    args.work.mkdir(parents=True, exist_ok=True)
    known = args.json is not None and args.json.exists()
    results: dict[str, dict[str, float]] = json.loads(args.json.read_text()) if known else {}
    jobs = [(Path(r).stem, made, r) for r in args.recipes]
    jobs += [(p.replace(":", " "), made_by_peer, p) for p in args.peer]
    jobs += [(p.stem, as_given, str(p)) for p in args.also]
    for name, make, what in (job for job in jobs if job[0] not in results):
        try:
            output, minutes = make(args.model, what, args.work)
        except RuntimeError as e:
            print(f"{name}: {e}", file=sys.stderr)
            continue
        found = measured(output, args.model, args.tokens) | {"minutes": minutes}
        left_out = SPEEDS if args.no_speeds else ()
        results[name] = {k: v for k, v in found.items() if k not in left_out}
        print(name, results[name], flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1))
    print(table(results))
    if args.update:
        update(args.update, args.model.name, table(results))


if __name__ == "__main__":
    main()
