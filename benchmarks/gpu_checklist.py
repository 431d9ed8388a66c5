"""What a GPU shows first: limits, bits, memory errors, speed. A JSON line for each thing found.

python benchmarks/gpu_checklist.py --list
python benchmarks/gpu_checklist.py bits --random llama-1b --out bits.jsonl
python benchmarks/gpu_checklist.py speed --random llama-8b --format q4_0 --out q4.jsonl --svg q4.svg

Each piece takes less than nine minutes. Weights are random and made on the device, so nothing has to
be brought there. `--random tiny --device cpu` runs the same code with the operations in torch.
Speeds are medians of steps, compared with the device's nominal limits and with copies measured here.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from octavo.backends.base import BLOCK
from octavo.backends.cuda.constants import PARTIAL_TOKENS, UNPACKED_TOKENS, up
from octavo.backends.cuda.device import operations
from octavo.backends.cuda.graphs import Call, Calls
from octavo.backends.cuda.inputs import step_size
from octavo.backends.cuda.tensors import Matrix

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.gpu_baseline import replayed
from benchmarks.gpu_model import FORMATS, SHAPES, Model, seconds

BASELINE = Path(__file__).with_name("gpu_baseline.py")
SERVE = Path(__file__).with_name("gpu_serve.py")
NOMINAL = {"H100": 3.35e12, "H200": 4.8e12}  # bytes a second, of the SXM boards
Line = dict[str, Any]


def limits(a: argparse.Namespace, device: torch.device) -> Iterator[Line]:
    """Versions, copies and products: what the device gives."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found = {p: version(p) for p in ("torch", "octavo")}
    yield {"item": "versions", "device": name, **found}
    size = (1 << 30) if device.type == "cuda" else 1 << 20
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    took = seconds(device, lambda: target.copy_(source))
    yield {"item": "copy", "bytes_per_second": 2 * size / took}
    n = 8192 if device.type == "cuda" else 64
    x, y = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    took = seconds(device, lambda: torch.mm(x, y))
    yield {"item": "product", "flops": 2 * n**3 / took}


def bits(a: argparse.Namespace, device: torch.device) -> Iterator[Line]:
    """Equal bits: rows of linear layers, chunks of prompts, sequences alone and together, graphs."""
    model = Model(a.random, a.format, device, 2048)
    yield from linear_rows(model)
    yield from chunks(model)
    yield from together(model)


def linear_rows(model: Model) -> Iterator[Line]:
    """A row's sums alone and among others, of every shape of matrix."""
    functions, device = operations(model.device), model.device
    counts = (1, 7, 16, 64, 513) if model.shape.hidden >= 256 else (1, 7, 80)
    seen = set()
    for w in model.executable.placed.matrices:
        if (w.n, w.k) in seen:
            continue
        seen.add((w.n, w.k))
        wide = w.codes.shape[-1] if w.kind == "bf16" else w.codes.shape[1] * 64
        x = torch.randn(counts[-1], wide, device=device).bfloat16()
        x[:, w.k :] = 0
        expected = None
        for count in reversed(counts):
            out = torch.empty(1, count, w.n, device=device)
            many = w.kind != "bf16" and count >= UNPACKED_TOKENS
            room = torch.empty(up(w.n), wide, device=device).bfloat16() if many else None
            functions.linear(x[:count].contiguous(), w, out, room)
            expected = out[0] if expected is None else expected
            same = torch.equal(out[0], expected[:count])
            yield {"item": "linear", "shape": [w.n, w.k], "rows": count, "same": same}


def chunks(model: Model) -> Iterator[Line]:
    """The last logits of prompts, however they are cut."""
    small = model.shape.hidden < 256
    for length in (1, 511, 513) if small else (1, 511, 512, 513, 4097):
        ids, table = model.ids(length, length), model.blocks(0, length)
        found = {}
        for cut in (length, 512, 17) if length < 1000 else (2048, 512, 100):
            for at in range(0, length, cut):
                model.executable.step(model.step([(ids[at : at + cut], at, table)]))
            found[cut] = model.executable.logits(1)
        same = all(np.array_equal(x, found[min(found)]) for x in found.values())
        yield {"item": "chunks", "length": length, "cuts": list(found), "same": same}


def together(model: Model) -> Iterator[Line]:
    """Sequences alone, together, and beside another's prompt; calls against graphs."""
    count, length = (4, 40) if model.shape.hidden < 256 else (32, 600)
    own = [model.ids(i, length) for i in range(count)]
    tables = [model.blocks(i, length + BLOCK) for i in range(count + 1)]
    step, executable = model.step, model.executable
    alone = []
    for ids, table in zip(own, tables, strict=False):
        executable.step(step([(ids, 0, table)]))
        executable.step(step([([5], length, table)]))
        alone.append(executable.logits(1)[0])
    decoding = [([5], length, table) for table in tables[:count]]
    for round in range(3):  # by calls, captured, replayed
        executable.step(step(decoding))
        same = np.array_equal(executable.logits(count), np.array(alone))
        yield {"item": "together", "sequences": count, "round": round, "same": same}
    beside = (model.ids(99, length), 0, tables[count])
    executable.step(step([*decoding, beside]))
    same = np.array_equal(executable.logits(count), np.array(alone))
    yield {"item": "beside a prompt", "sequences": count, "same": same}


def memcheck(a: argparse.Namespace, device: torch.device) -> Iterator[Line]:
    """A tiny model's bits under compute-sanitizer."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        yield {"item": "memcheck", "skipped": "there is no compute-sanitizer"}
        return
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, __file__]
    done = subprocess.run([*command, "bits", "--random", "tiny"], capture_output=True, text=True)
    yield {"item": "memcheck", "clean": done.returncode == 0, "tail": done.stdout[-500:]}


def speed(a: argparse.Namespace, device: torch.device) -> Iterator[Line]:
    """Milliseconds of a decoding step and tokens a second of a prompt, and the share of limits."""
    small = a.random == "tiny"
    context, batches = (64, (1, 4)) if small else (1024, (1, 16, 64, 256))
    blocks = batches[-1] * (context // BLOCK + 1)
    begin = time.perf_counter()
    model = Model(a.random, a.format, device, blocks)
    made = time.perf_counter() - begin
    model.executable.step(model.step([([5], 0, [0])]))
    first = time.perf_counter() - begin - made
    yield {"item": "made", "seconds": made, "first_step": first, "weights": model.weights}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    nominal = next((v for k, v in NOMINAL.items() if k in name), None)
    for batch in batches:
        spans = [([5], context, model.blocks(i, context + BLOCK)) for i in range(batch)]
        step = model.step(spans)
        took = seconds(device, partial(model.executable.step, step))
        chained = partial(model.executable.decode, step, 16, [[]] * batch)
        each = seconds(device, chained, 3) / 16
        read = model.weights + batch * context * model.token
        yield {
            "item": "decode", "model": a.random, "format": a.format, "batch": batch,
            "context": context, "ms": each * 1e3, "ms_alone": took * 1e3,
            "tokens_per_second": batch / each, "bytes_per_second": read / each,
            "share": read / each / nominal if nominal else None,
        }  # fmt: skip
    for length in (64,) if small else (512, 2048):
        step = model.step([(model.ids(1, length), 0, model.blocks(0, length))])
        took = seconds(device, partial(model.executable.step, step), 5)
        flops = 2 * sum(m.n * m.k for m in model.executable.placed.matrices[1:]) * length
        yield {
            "item": "prefill", "model": a.random, "format": a.format, "tokens": length,
            "ms": took * 1e3, "tokens_per_second": length / took, "flops": flops / took,
        }  # fmt: skip


def label(call: Call) -> str:
    """The name of a launch; of linear layers with the shape of their weights. Empty: no launch."""
    name: str = getattr(getattr(call, "func", None), "__name__", "")
    w = call.args[1] if name == "linear" and isinstance(call, partial) else None
    return f"{name} {w.n} x {w.k}" if isinstance(w, Matrix) else name


def kernels(a: argparse.Namespace, device: torch.device) -> Iterator[Line]:
    """Microseconds of each operation in steps of decoding and of a prompt, in a graph of its own."""
    small = a.random == "tiny"
    context, prompt = (64, 64) if small else (1024, 2048)
    model = Model(a.random, a.format, device, 64 * (context // BLOCK + 1))
    decoding = [
        [([5], context, model.blocks(i, context + BLOCK)) for i in range(batch)]
        for batch in ((1, 4) if small else (1, 64))
    ]
    for spans in (*decoding, [(model.ids(1, prompt), 0, model.blocks(0, prompt))]):
        step = model.step(spans)
        model.executable.step(step)
        groups: dict[str, list[Call]] = {}
        for call in model.executable.calls(step_size(step)):
            if name := label(call):
                groups.setdefault(name, []).append(call)
        for name, calls in groups.items():
            took = seconds(device, replayed(partial(Calls().run, step_size(step), calls), device))
            yield {
                "item": "kernel", "rows": len(step.ids), "name": name, "launches": len(calls),
                "microseconds": took * 1e6, "each": took * 1e6 / len(calls),
            }  # fmt: skip


def constraints(a: argparse.Namespace, device: torch.device) -> Iterator[Line]:
    """Microseconds of linear layers with their fixed slices, and with those that are fastest."""
    linear = operations(device).linear
    module = sys.modules[linear.__module__]
    fixed = module.slice_width
    shapes: dict[tuple[int, int], list[Matrix]] = {}
    for w in Model(a.random, a.format, device, 64).executable.placed.matrices:
        shapes.setdefault((w.n, w.k), []).append(w)

    def timed(matrices: list[Matrix], x: torch.Tensor, width: int) -> float:
        w = matrices[0]
        parts = -(-up(w.k) // width) if len(x) <= PARTIAL_TOKENS else 1
        out = torch.empty(parts, len(x), w.n, device=device)
        module.slice_width = lambda *_: width
        calls: list[Call] = [partial(linear, x, each, out) for each in matrices]
        took = seconds(device, replayed(lambda: [call() for call in calls], device), 7)
        module.slice_width = fixed
        return took * 1e6

    for tokens in (1, 8) if a.random == "tiny" else (1, 64, 2048):
        total = least = 0.0
        for (n, k), matrices in shapes.items():
            if n == SHAPES[a.random].vocabulary and tokens > PARTIAL_TOKENS:
                continue  # the head, which multiplies selected rows
            x = torch.randn(tokens, up(k), device=device).bfloat16()
            own = fixed(matrices[0].kind, n, k)
            widths = sorted({own, up(k), up(-(-k // 2), 128), up(-(-k // 4), 128)})
            found = {width: timed(matrices, x, width) for width in widths}
            total, least = total + found[own], least + min(found.values())
            yield {
                "item": "slices", "tokens": tokens, "shape": [n, k], "fixed": own,
                "microseconds": found[own], "least": min(found.values()),
                "fastest": min(found, key=lambda width: found[width]),
            }  # fmt: skip
        yield {"item": "exactness", "tokens": tokens, "cost": total / least - 1}


def serve(a: argparse.Namespace, device: torch.device) -> Iterator[Line]:
    """A server with random weights on disk: its start, first tokens, and tokens a second."""
    command = [sys.executable, str(SERVE), a.random]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    yield from map(json.loads, done.stdout.splitlines())


def baseline(a: argparse.Namespace, device: torch.device) -> Iterator[Line]:
    """What PyTorch's own operations reach on the same shape: decoding by batch, prompts by length."""
    shape = ",".join(map(str, SHAPES[a.random]))
    command = [sys.executable, str(BASELINE), shape, "--device", str(device)]
    if a.random == "tiny":
        command += ["--batches", "1,4", "--context", "64", "--prompts", "64"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    yield from map(json.loads, done.stdout.splitlines())


PIECES = {
    f.__name__: f for f in (limits, bits, memcheck, speed, kernels, constraints, baseline, serve)
}


def chart(lines: list[Line]) -> str:
    """Bars of what decoding reaches of the memory's bandwidth."""
    found = [line for line in lines if line["item"] == "decode"]
    most = max((line["bytes_per_second"] for line in found), default=1.0)
    bars = []
    for i, line in enumerate(found):
        y, width = 30 + 24 * i, 400 * line["bytes_per_second"] / most
        share = f", {line['share']:.0%} of the limit" if line["share"] else ""
        text = f"{line['batch']} streams: {line['ms']:.2f} ms{share}"
        bars.append(f'<rect x="8" y="{y}" width="{width:.0f}" height="18" fill="#9bd"/>')
        bars.append(f'<text x="14" y="{y + 13}" font-size="12">{text}</text>')
    height = 40 + 24 * len(found)
    title = f"{found[0]['model']} {found[0]['format']}: decoding" if found else "no speeds"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="420" height="{height}" '
        f'font-family="sans-serif"><text x="8" y="18" font-size="14">{title}</text>'
        f"{''.join(bars)}</svg>\n"
    )


def main(argv: list[str] | None = None) -> int:
    """Runs pieces. 1 if bits differ or memory errors were found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pieces", nargs="*", help=f"of {', '.join(PIECES)}; all if none is named")
    parser.add_argument("--list", action="store_true", help="what each piece does")
    parser.add_argument("--random", choices=SHAPES, default="llama-1b")
    parser.add_argument("--format", choices=FORMATS, default="bf16")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--svg", type=Path)
    a = parser.parse_args(argv)
    if a.list:
        for name, piece in PIECES.items():
            print(f"{name:10} {(piece.__doc__ or '').splitlines()[0]}")
        return 0
    lines: list[Line] = []
    for name in a.pieces or PIECES:
        for line in PIECES[name](a, torch.device(a.device)):
            lines.append(line)
            print(json.dumps(line), flush=True)
    if a.out:
        a.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if a.svg:
        a.svg.write_text(chart(lines))
    wrong = [line for line in lines if line.get("same") is False or line.get("clean") is False]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
