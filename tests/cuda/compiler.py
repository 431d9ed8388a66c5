"""Compiles what cases launch for an H100 and prints a line of JSON for each kernel.

python -m tests.cuda.compiler linear
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.cuda.cases import GROUPS

TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8",
}  # fmt: skip
DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
COUNTED = ("HGMMA", "HMMA", "UTMALDG", "LDL", "STL", "LDSM", "I2F", "I2FP")


def specialize(fn: JITFunction, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Signature, constants and attributes, as a launch has them."""
    values = dict(zip(fn.arg_names, args, strict=False)) | named
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(fn.params):
        value = values[parameter.name]
        kind = "constexpr"
        if isinstance(value, torch.Tensor):
            kind = TYPES[value.dtype]
        elif isinstance(value, TensorDescriptor):
            kind = f"tensordesc<{TYPES[value.base.dtype][1:]}{value.block_shape}>"
        elif not parameter.is_constexpr and isinstance(value, float):
            kind = "fp32"
        elif not parameter.is_constexpr and isinstance(value, int) and value != 1:
            kind = "i32"
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = value
        elif kind.startswith("*") or (kind == "i32" and value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def measure(fn: JITFunction, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Compiles one launch; instructions by name, those with local memory among products (inner),
    how numbers become bf16, and bytes of shared memory."""
    options = {k: named.pop(k) for k in ("num_warps", "num_stages", "launch_pdl") if k in named}
    signature, constants, attributes = specialize(fn, args, named)
    source = ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        listing = subprocess.run(
            [DISASSEMBLER, "-c", file.name], capture_output=True, text=True, check=True
        ).stdout
    counts = {name: len(re.findall(rf"\b{name}\b", listing)) for name in COUNTED}
    products = re.findall(r"HGMMA.*HGMMA", listing, re.DOTALL)
    counts["inner"] = len(re.findall(r"\b(?:LDL|STL)\b", "".join(products)))
    rounds = sorted(set(re.findall(r"\bcvt\.(r\w)\.bf16", kernel.asm["ptx"])))
    width = constants.get("D", constants.get("BT"))  # features of a head, tokens of a tile
    found = {"width": width, "rounds": rounds, "shared": kernel.metadata.shared}
    return {"kernel": fn.__name__, **found, **counts}


def main() -> None:
    launches: list[tuple[JITFunction, tuple[Any, ...], dict[str, Any]]] = []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        launches.append((self, args, named))

    JITFunction.run = run
    for name, call in GROUPS[sys.argv[1]]():
        launches.clear()
        call()
        for fn, args, named in launches:
            print(json.dumps({"case": name, **measure(fn, args, dict(named))}), flush=True)


if __name__ == "__main__":
    main()
