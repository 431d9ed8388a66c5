"""Whether other loaders read the weights of quantized folders as Octavo does, bit by bit.

    python benchmarks/loaders.py /tmp/small/gptq-4 /tmp/small/awq-4 --work /tmp/small

Folders are Octavo's or others' (`compress.py --peer` makes some). GPTQModel reads gptq and awq,
transformers with compressed-tensors what llm-compressor writes; both are installed under --work.
Exits with 1 if a layer differs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from compress import HERE, installed, run

from octavo.checkpoint import open_checkpoint
from octavo.checkpoint.dequantize import dequantize

LOADERS = {"gptq": "gptqmodel", "awq": "gptqmodel", "compressed-tensors": "llm-compressor"}


def equal_layers(folder: Path, work: Path) -> tuple[str, int, int, float]:
    """Who else read it, how many layers were the same, of how many, and the largest difference as a
    share of a layer's largest weight."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    loader, output = LOADERS[config["quant_method"]], work / "loaded.npz"
    run([str(installed(loader, work)), str(HERE / "loaded_weights.py"), str(folder), str(output)])
    tensors = open_checkpoint(folder).tensors
    with np.load(output) as theirs:
        names = theirs.files
        apart = [difference(dequantize(tensors[name]), theirs[name]) for name in names]
    output.unlink()
    return loader, apart.count(0), len(names), max(apart, default=0)


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference of two matrices, as a share of the second's largest weight."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    different = 0
    for folder in args.folders:
        loader, same, count, apart = equal_layers(folder, args.work)
        rest = f"; {apart:.1e} apart at most" if same < count else ""
        print(f"{folder.name}: {same} of {count} layers as {loader} reads them{rest}", flush=True)
        different += count - same or count == 0
    raise SystemExit(1 if different else 0)


if __name__ == "__main__":
    main()
