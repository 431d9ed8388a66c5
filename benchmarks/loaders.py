"""Whether other loaders read the weights of quantized folders as Octavo does, bit by bit.

    python benchmarks/loaders.py /tmp/small/gptq-4 /tmp/small/awq-4 --work /tmp/small

Folders are Octavo's or others' (`compress.py --peer` makes some). GPTQModel reads gptq and awq,
AutoRound gptq, transformers with compressed-tensors what llm-compressor writes; all are installed
under --work. Exits with 1 if a layer differs, or if nobody else reads a folder.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from compress import HERE, installed, run

from octavo.checkpoint import open_checkpoint
from octavo.checkpoint.dequantize import dequantize

LOADERS = {
    "gptq": ("gptqmodel", "auto-round"),
    "awq": ("gptqmodel",),
    "compressed-tensors": ("llm-compressor",),
}


def loaders_of(folder: Path) -> tuple[str, ...]:
    """Who else reads a folder's format."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    return LOADERS[config["quant_method"]]


def equal_layers(folder: Path, loader: str, work: Path) -> tuple[int, int, float]:
    """How many layers are the same as another loader reads them, of how many, and the largest
    difference as a share of a layer's largest weight. Raises RuntimeError with what it says if it
    reads none."""
    output, script = work / "loaded.npz", HERE / "loaded_weights.py"
    run([str(installed(loader, work)), str(script), loader, str(folder), str(output)])
    tensors = open_checkpoint(folder).tensors
    with np.load(output) as theirs:
        names = theirs.files
        apart = [difference(dequantize(tensors[name]), theirs[name]) for name in names]
    output.unlink()
    if not names:
        raise RuntimeError("it has no layers")
    return apart.count(0), len(names), max(apart)


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference of two matrices, as a share of the second's largest weight."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    wrong = 0
    for folder in args.folders:
        read = False
        for loader in loaders_of(folder):
            try:
                same, count, apart = equal_layers(folder, loader, args.work)
            except RuntimeError as e:
                print(f"{folder.name}: not read by {loader}: {e}", flush=True)
                continue
            rest = f"; {apart:.1e} apart at most" if same < count else ""
            print(
                f"{folder.name}: {same} of {count} layers as {loader} reads them{rest}", flush=True
            )
            read, wrong = True, wrong + (same < count)
        wrong += not read
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
