"""How much memory rounding a model takes at most, of one that is larger than that.

    python benchmarks/compress_memory.py --work /tmp/big --recipes rtn-4 gptq-4

Writes a random Llama of 3 GB in bf16 under --work, of the shape that models of 1.5 billion weights
have, rounds it by each recipe in a process of its own, and says what was resident there at most,
mapped pages of files included. Takes 5 GB of disk, and leaves nothing there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from octavo.checkpoint.base import TensorType
from octavo.checkpoint.files import MemoryFile
from octavo.checkpoint.writer import NewTensor, write_folder
from octavo.compress.packing import as_floats

ROUND = """
import os, sys, octavo
from octavo.cli.quantize import MATRIX
from octavo.compress import calibrated
from octavo.compress.serving import peak_rss
from octavo.process import unmap_freed_blocks
folder, recipe, output, sequences = sys.argv[1:]
calibrated.SEQUENCES = int(sequences)
unmap_freed_blocks(MATRIX)  # as the command does
octavo.quantize(folder, recipe=recipe, output=output)
print(peak_rss(os.getpid()))
"""
HIDDEN, FFN, HEADS, KV_HEADS, VOCABULARY = 2048, 5632, 32, 8, 128_256


def config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": FFN, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "tie_word_embeddings": False, "hidden_act": "silu",
        "torch_dtype": "bfloat16", "eos_token_id": 0, "bos_token_id": 0,
    }  # fmt: skip


def tokenizer() -> bytes:
    """A tokenizer.json whose tokens are bytes, by the characters that byte-level BPE has."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printed]
    bytes_as = printed + [256 + i for i in range(len(rest))]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    vocabulary = {chr(c): i for i, c in enumerate(bytes_as)}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    return json.dumps(
        {"version": "1.0", "pre_tokenizer": level, "decoder": level, "model": model}
    ).encode()


def write_model(folder: Path, layers: int) -> int:
    """Writes random weights, a matrix at a time, and gives their bytes."""
    rng, kind = np.random.default_rng(0), TensorType.BF16

    def matrix(rows: int, columns: int) -> NewTensor:
        def make() -> Any:  # signs and mantissas of chance, magnitudes from 2^-11 to 2^-7
            bits = rng.integers(0, 1 << 16, (rows, columns), np.uint16)
            return bits & np.uint16(0x81FF) | np.uint16(0x3A00)

        return NewTensor(kind, (rows, columns), make)

    norm = NewTensor.of(as_floats(np.ones(HIDDEN, np.float32), kind), kind)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN)}
    for i in range(layers):
        own = f"model.layers.{i}"
        tensors |= {f"{own}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        tensors |= {f"{own}.{n}_layernorm.weight": norm for n in ("input", "post_attention")}
    tensors |= {"model.norm.weight": norm, "lm_head.weight": matrix(VOCABULARY, HIDDEN)}
    write_folder(
        folder, config(layers), tensors, {"tokenizer.json": MemoryFile("tokenizer.json", tokenizer)}
    )
    return sum(f.stat().st_size for f in folder.glob("*.safetensors"))


def peak(*given: object) -> int:
    """The most bytes that the process that rounds had resident."""
    command = [sys.executable, "-c", ROUND, *map(str, given)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="a new folder")
    parser.add_argument("--recipes", nargs="+", default=["rtn-4", "gptq-4"])
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--sequences", type=int, default=4, help="of 512 tokens that layers see")
    args = parser.parse_args()
    if args.work.exists():
        parser.error(f"{args.work} is there already, and would be removed")
    folder, output = args.work / "model", args.work / "made"
    args.work.mkdir(parents=True)
    try:
        size = write_model(folder, args.layers)
        print(f"{size / 1e9:.2f} GB, {args.layers} layers", flush=True)
        for recipe in args.recipes:
            found = peak(folder, recipe, output, args.sequences)
            print(f"{recipe}: {found / 1e6:,.0f} MB at most", flush=True)
            shutil.rmtree(output)
    finally:
        shutil.rmtree(args.work)


if __name__ == "__main__":
    main()
