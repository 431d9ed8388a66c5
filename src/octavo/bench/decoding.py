"""What grammars, log-probabilities, adapters and beams add to a decoding step."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo.bench.kernels import measure_limits
from octavo.engine.constraint import GrammarCompiler, TokenTable
from octavo.engine.engine import Engine
from octavo.engine.host import usable_threads
from octavo.engine.loader import load_engine, open_model
from octavo.engine.plan import make_plan
from octavo.engine.request import BeamSearch, Request, SamplingParams
from octavo.generate.load import token_table
from octavo.models.adapters import adapter_targets
from octavo.program import Linear, Program
from octavo.text import load_tokenizer
from octavo.text.grammar import from_schema

STREAMS, TOKENS, RANK, ADAPTERS, WIDTH = 8, 64, 16, 8, 4
LORA_ROOM = 512 << 20
SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string", "minLength": 200}, "n": {"type": "integer"}},
    "required": ["title", "n"],
}


@dataclass(frozen=True)
class Cost:
    """A way of decoding: milliseconds per step, and percent over its baseline (None: it is one).

    least: percent that reading the weights it adds takes by itself, at the host's speed.
    """

    name: str
    step_ms: float
    percent: float | None
    least: float


def write_adapter(
    folder: Path, program: Program, names: dict[str, str], seed: int, parts: tuple[str, ...]
) -> Path:
    """A PEFT folder of random bf16 factors of rank 16 for modules whose names end with `parts`."""
    rng = np.random.default_rng(seed)
    header, chunks, at = {}, [], 0
    for op in program.ops:
        if not isinstance(op, Linear) or op.out.selected:
            continue
        if not names[op.weight.tensor.name].endswith(parts):
            continue
        outputs, inputs = op.weight.tensor.shape
        for part, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
            values = (rng.standard_normal(shape) * 0.01).astype(np.float32)
            data = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
            key = f"base_model.model.{names[op.weight.tensor.name]}.lora_{part}.weight"
            end = at + len(data)
            header[key] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
            chunks.append(data)
            at = end
    text = json.dumps(header).encode()
    folder.mkdir(parents=True)
    file = len(text).to_bytes(8, "little") + text + b"".join(chunks)
    (folder / "adapter_model.safetensors").write_bytes(file)
    (folder / "adapter_config.json").write_text(json.dumps({"r": RANK, "lora_alpha": RANK}))
    return folder


def step_ms(engine: Engine, requests: list[Request]) -> float:
    """Milliseconds per step once all prompts are computed."""
    for request in requests:
        engine.add(request)
    while engine.stats().waiting or any(s.kv.pending > 1 for s in engine.scheduler.running):
        engine.step()
    steps, began = engine.stats().steps, time.perf_counter()
    while engine.has_work and engine.stats().steps - steps < TOKENS - 8:
        engine.step()
    spent = time.perf_counter() - began
    steps = engine.stats().steps - steps
    for request in requests:
        engine.abort(request.id)
    return 1000 * spent / steps


def mask_times(compiler: GrammarCompiler, tokens: list[int]) -> list[float]:
    """Milliseconds of each mask along a text that satisfies the schema."""
    constraint = compiler.constraint(compiler.start(from_schema(SCHEMA)))
    out = []
    for token in tokens:
        began = time.perf_counter()
        constraint.mask()
        out.append(1000 * (time.perf_counter() - began))
        constraint.push(token)
    return out


def load_engines(
    path: Path, name: str, threads: int | None, table: TokenTable
) -> tuple[Engine, Engine, dict[str, int]]:
    """An engine without adapters, and one with eight on q and v ("qv0") and eight on all layers;
    bytes of the eight, by kind."""
    plain_model, lora_model = open_model(path), open_model(path, adapters=True)
    sizes = {"name": name, "threads": threads, "context": 1024, "memory": "2GiB"}
    plain = load_engine(plain_model, make_plan(plain_model.compiled, **sizes), table)  # type: ignore[arg-type]
    lora_plan = make_plan(lora_model.compiled, adapters=LORA_ROOM, **sizes)  # type: ignore[arg-type]
    lora = load_engine(lora_model, lora_plan, table)
    while plain.pack_pending() or lora.pack_pending():
        pass
    assert lora.adapters is not None
    targets = adapter_targets(lora_model.checkpoint, lora_model.program)
    names = {t.tensor: module for module, ts in targets.items() for t in ts}
    sizes_of = {"qv": 0, "all": 0}
    with tempfile.TemporaryDirectory() as scratch:
        for kind, parts in (("all", ("proj",)), ("qv", ("q_proj", "v_proj"))):
            for i in range(ADAPTERS):
                folder = Path(scratch) / f"{kind}{i}"
                write_adapter(folder, lora_model.program, names, i, parts)
                lora.adapters.load(folder.name, folder)
                sizes_of[kind] += (folder / "adapter_model.safetensors").stat().st_size
    return plain, lora, sizes_of


def batch(
    prompt: list[int], count: int = STREAMS, adapter: str = "", **params: object
) -> list[Request]:
    """Requests that differ in the last token of their prompts."""
    fields = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True} | params
    return [
        Request(
            id=str(i), prompt=[*prompt, 300 + i], params=SamplingParams(**fields),  # type: ignore[arg-type]
            adapter=adapter and f"{adapter}{i % ADAPTERS}",
        )
        for i in range(count)
    ]  # fmt: skip


def bench_decoding(
    path: Path, name: str, threads: int | None, repeats: int, show: Callable[[str], None]
) -> list[Cost]:
    """Medians of `repeats` rounds in which all ways take turns."""
    tokenizer = load_tokenizer(open_model(path).checkpoint)
    plain, lora, bytes_of = load_engines(path, name, threads, token_table(tokenizer))
    prompt = tokenizer.encode("Write a JSON object with a long title.")
    eight, four = f"{STREAMS} streams", f"{WIDTH} streams"
    grammar, beam = from_schema(SCHEMA), BeamSearch(width=WIDTH)
    on_some, on_all = f"{ADAPTERS} adapters on q, v", f"{ADAPTERS} adapters on all layers"
    more = {on_some: bytes_of["qv"], on_all: bytes_of["all"]}
    ways: list[tuple[str, str, Engine, list[Request]]] = [  # name, baseline, engine, requests
        (eight, "", plain, batch(prompt)),
        ("grammar", eight, plain, batch(prompt, grammar=grammar)),
        ("logprobs 5", eight, plain, batch(prompt, logprobs=5)),
        (on_some, eight, lora, batch(prompt, adapter="qv")),
        (on_all, eight, lora, batch(prompt, adapter="all")),
        ("adapters allowed, unused", eight, lora, batch(prompt)),
        (four, "", plain, batch(prompt, WIDTH)),
        (f"beam search, width {WIDTH}", four, plain, batch(prompt, 1, beam=beam)),
    ]
    times: dict[str, list[float]] = {way: [] for way, *_ in ways}
    bandwidths = []  # bytes per millisecond
    for i in range(repeats + 1):
        bandwidths.append(1e6 * measure_limits("", threads or usable_threads()).read_gbs)
        for way, _, engine, requests in ways:
            spent = step_ms(engine, requests)
            if i:
                times[way].append(spent)
    assert plain.grammars is not None
    text = json.dumps({"title": "A long title, with words and more words. " * 6, "n": 12})
    masks = sorted(mask_times(plain.grammars, tokenizer.encode(text, add_bos=False)))
    last = masks[int(len(masks) * 0.99)]
    show(f"mask: median {statistics.median(masks):.3f} ms, p99 {last:.3f} ms")
    out = []
    for way, baseline, _, _ in ways:
        ratios = [a / b for a, b in zip(times[way], times[baseline or way], strict=True)]
        percent = 100 * (statistics.median(ratios) - 1) if baseline else None
        reading = more.get(way, 0) / statistics.median(bandwidths)
        least = 100 * reading / statistics.median(times[baseline or way])
        out.append(Cost(way, statistics.median(times[way]), percent, least))
    return out
