"""What grammars, log-probabilities, adapters and beams add to a decoding step."""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import uvloop

from octavo.bench.kernels import measure_limits
from octavo.client.base import EngineClient
from octavo.client.in_process import InProcessClient
from octavo.engine.constraint import GrammarCompiler, TokenTable
from octavo.engine.events import Ended
from octavo.engine.host import usable_threads
from octavo.engine.loader import load_executable, make_engine
from octavo.engine.open import OpenModel, open_model
from octavo.engine.plan import make_plan
from octavo.engine.request import BeamSearch, Request, SamplingParams
from octavo.generate.output import failure
from octavo.generate.served import token_table
from octavo.models.adapters import adapter_targets
from octavo.program import Linear, Program
from octavo.text import load_tokenizer
from octavo.text.grammar import from_schema

STREAMS, TOKENS, RANK, ADAPTERS, WIDTH = 8, 64, 16, 8, 4
FIRST = 8  # tokens of a short run
LORA_ROOM = 512 << 20
SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string", "minLength": 200}, "n": {"type": "integer"}},
    "required": ["title", "n"],
}


@dataclass(frozen=True)
class MethodCost:
    """A way of decoding: milliseconds per step, and percent over its baseline (None: it is one).

    least: percent that reading the weights it adds takes by itself, at the host's speed.
    """

    name: str
    step_ms: float
    percent: float | None
    least: float


@dataclass(frozen=True)
class Way:
    """A way of decoding. baseline: the name of the way it is compared with. adapters: kind of those
    it uses."""

    name: str
    baseline: str
    client: EngineClient
    requests: list[Request]
    adapters: str = ""


Loaded = tuple[OpenModel, InProcessClient]


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


async def step_ms(client: EngineClient, requests: list[Request]) -> float:
    """Milliseconds of a step after the first few: what a long run takes more than a short one."""
    (steps, busy), (more_steps, more_busy) = [
        await _run(client, [_limited(r, tokens) for r in requests]) for tokens in (FIRST, TOKENS)
    ]
    return (more_busy - busy) / (more_steps - steps) / 1000


def _limited(request: Request, tokens: int) -> Request:
    params = msgspec.structs.replace(request.params, max_tokens=tokens)
    return msgspec.structs.replace(request, params=params)


async def _run(client: EngineClient, requests: list[Request]) -> tuple[int, int]:
    """Steps that requests take together, and microseconds in them. Raises RequestError."""

    async def read(request: Request) -> None:
        async with aclosing(client.submit(request)) as events:
            async for event in events:
                if isinstance(event, Ended) and (error := failure(event)):
                    raise error

    before = client.stats
    await asyncio.gather(*map(read, requests))
    after = client.stats
    return after["steps"] - before["steps"], after["busy_us"] - before["busy_us"]


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


def _load(path: Path, name: str, threads: int | None, table: TokenTable, adapters: int) -> Loaded:
    """A model and a client of its engine, all packed. adapters: bytes that LoRA adapters get."""
    model = open_model(path, adapters=adapters > 0)
    plan = make_plan(
        model.compiled, name=name, threads=threads, context=1024, memory="2GiB", adapters=adapters,
        encoder=model.encoder,
        speculation="off",
    )  # fmt: skip
    executable = load_executable(model, plan)
    while executable.pack_pending():
        pass
    return model, InProcessClient(make_engine(model, executable, plan, table))


async def load_adapters(model: OpenModel, client: EngineClient) -> dict[str, int]:
    """Loads eight adapters on q and v ("qv0") and eight on all layers; bytes of the eight."""
    targets = adapter_targets(model.checkpoint, model.program)
    names = {t.tensor: module for module, ts in targets.items() for t in ts}
    sizes = {"qv": 0, "all": 0}
    with tempfile.TemporaryDirectory() as scratch:
        for kind, parts in (("all", ("proj",)), ("qv", ("q_proj", "v_proj"))):
            for i in range(ADAPTERS):
                folder = Path(scratch) / f"{kind}{i}"
                write_adapter(folder, model.program, names, i, parts)
                await client.load_adapter(folder.name, str(folder))
                sizes[kind] += (folder / "adapter_model.safetensors").stat().st_size
    return sizes


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
) -> list[MethodCost]:
    """Medians of `repeats` rounds in which all ways take turns."""
    tokenizer = load_tokenizer(open_model(path).checkpoint)
    table = token_table(tokenizer)
    model, plain = _load(path, name, threads, table, 0)
    lora_model, lora = _load(path, name, threads, table, LORA_ROOM)

    async def work() -> list[MethodCost]:
        try:
            bytes_of = await load_adapters(lora_model, lora)
            ways = _ways(tokenizer.encode("Write a JSON object with a long title."), plain, lora)
            return await _costs(ways, bytes_of, threads or usable_threads(), repeats)
        finally:
            await plain.close()
            await lora.close()

    costs = uvloop.run(work())
    text = json.dumps({"title": "A long title, with words and more words. " * 6, "n": 12})
    compiler = GrammarCompiler(table, model.vocabulary)
    masks = sorted(mask_times(compiler, tokenizer.encode(text, add_bos=False)))
    last = masks[int(len(masks) * 0.99)]
    show(f"mask: median {statistics.median(masks):.3f} ms, p99 {last:.3f} ms")
    return costs


def _ways(prompt: list[int], plain: EngineClient, lora: EngineClient) -> list[Way]:
    eight, four = f"{STREAMS} streams", f"{WIDTH} streams"
    grammar, beam = from_schema(SCHEMA), BeamSearch(width=WIDTH)
    return [
        Way(eight, "", plain, batch(prompt)),
        Way("grammar", eight, plain, batch(prompt, grammar=grammar)),
        Way("logprobs 5", eight, plain, batch(prompt, logprobs=5)),
        Way(f"{ADAPTERS} adapters on q, v", eight, lora, batch(prompt, adapter="qv"), "qv"),
        Way(f"{ADAPTERS} adapters on all layers", eight, lora, batch(prompt, adapter="all"), "all"),
        Way("adapters allowed, unused", eight, lora, batch(prompt)),
        Way(four, "", plain, batch(prompt, WIDTH)),
        Way(f"beam search, width {WIDTH}", four, plain, batch(prompt, 1, beam=beam)),
    ]


async def _costs(
    ways: list[Way], bytes_of: dict[str, int], threads: int, repeats: int
) -> list[MethodCost]:
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    bandwidths = []  # bytes per millisecond
    for i in range(repeats + 1):
        bandwidths.append(1e6 * measure_limits("", threads).read_gbs)
        for way in ways:
            spent = await step_ms(way.client, way.requests)
            if i:
                times[way.name].append(spent)
    out = []
    for way in ways:
        own, base = times[way.name], times[way.baseline or way.name]
        ratios = [a / b for a, b in zip(own, base, strict=True)]
        percent = 100 * (statistics.median(ratios) - 1) if way.baseline else None
        reading = bytes_of.get(way.adapters, 0) / statistics.median(bandwidths)
        least = 100 * reading / statistics.median(base)
        out.append(MethodCost(way.name, statistics.median(own), percent, least))
    return out
