"""Memory, planned before anything is loaded: every buffer counted, nothing beyond it allocated."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from octavo.backends.base import BLOCK, Compiled, DeviceBytes, Footprint, ProgramOptions, StepLimits
from octavo.engine.draft_plan import CompiledDraft, DraftPlan
from octavo.engine.encoder import CompiledEncoder
from octavo.engine.host import host_memory, usable_threads
from octavo.errors import DoesNotFit, UsageError
from octavo.program import Program

GIB, MIB = 1 << 30, 1 << 20
STEP_TOKENS = 512  # tokens a step computes: prefill in pieces this long, half beside earlier texts
SEQUENCES = 64  # requests computed together
DEVICE_SHARE = 0.9  # of a GPU's memory, when no amount is named
DEFAULT_SHARE = 0.8  # of the memory available, when no amount is named
DEFAULT_CACHE = GIB  # KV cache when memory is plentiful, unless one context needs more
SMALLEST_CONTEXT = 256
PROCESS = (
    112 * MIB
)  # interpreter, libraries, metadata and queues of the engine process; measured 70-100
PAGES = 8 * MIB  # rounding to huge pages
MAX_THREADS = 256
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?b?|b|%|)\s*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the bytes go. `total` is a ceiling for the engine process."""

    weights: int
    buffers: int
    cache: int
    block: int  # bytes of one KV block
    available: int
    context: int
    model_context: int
    threads: int
    kv_dtype: str
    activations: str
    limits: StepLimits
    adapters: int = 0  # bytes that LoRA adapters may take
    encoder: int = 0  # weights and buffers of what encodes images
    image_cache: int = 0  # bytes of images' embeddings that are kept
    packed: bool = False  # keep packed weights in a file, and map them at the next start
    speculation: str = "auto"
    draft: DraftPlan | None = None
    vision_dtype: str = "auto"  # of what encodes images
    device: str = "cpu"
    process: int = PROCESS + PAGES  # beside what is counted above

    @property
    def load_options(self) -> ProgramOptions:
        return ProgramOptions(
            self.limits, self.threads, self.kv_dtype, self.packed, self.adapters, self.activations
        )

    @property
    def total(self) -> int:
        more = self.encoder + self.image_cache + (self.draft.total if self.draft else 0)
        return self.weights + self.buffers + self.cache + self.adapters + more + self.process

    @property
    def tokens(self) -> int:
        """Tokens the KV cache holds."""
        return self.limits.blocks * BLOCK


@dataclass(frozen=True, slots=True)
class Share:
    """Memory that several models use by turns: bytes for all of them, and what each may fill."""

    total: int
    each: int

    def cache(self, left: int, needed: int, asked: bool) -> int:
        """Bytes of the KV cache of a model that leaves so many of `total`. needed: for a context;
        asked: which was named."""
        least = needed if asked else min(needed, DEFAULT_CACHE)
        return max(least, left - self.total + self.each)


def size(n: float) -> str:
    """Bytes for people: MiB below one GiB."""
    return f"{n / GIB:.1f} GiB" if n >= GIB else f"{n / MIB:.0f} MiB"


def parse_size(text: str, available: int, option: str = "--memory") -> int:
    """`12GiB`, `800M`, `75%` of `available`, or bytes. Raises UsageError."""
    found = _SIZE.match(text)
    number, unit = (found[1], found[2].lower()) if found else ("0", "")
    value = float(number) / 100 * available if unit == "%" else float(number)
    if unit not in ("%", ""):
        value *= 1 << "bkmgt".index(unit[0]) * 10
    if not 0 < value < 1 << 60 or (unit == "%" and float(number) > 100):
        raise UsageError(f"{option} {text!r} is not an amount", f"{option} 8GiB", f"{option} 75%")
    if not unit and value < MIB:
        raise UsageError(f"{option} {text} means {text} bytes", f"{option} {number}GiB")
    return int(value)


def make_plan(
    compiled: Compiled, *, name: str, memory: str | None = None, context: int | None = None,
    threads: int | None = None, kv_dtype: str = "auto", activations: str = "auto",
    adapters: int = 0, packed: bool = False, speculation: str = "auto", what_if: bool = False,
    encoder: CompiledEncoder | None = None, share: Share | None = None,
    draft: CompiledDraft | None = None, replicas: int = 1,
) -> Plan:  # fmt: skip
    """Plans a model within `memory` (80 % of what is available unless named).

    A context that was not asked for shrinks to fit; one that was is refused with the sum.
    what_if: `memory` may be more than is available here. encoder: of images. share: instead of
    `memory`; the KV cache is then one context, of 1 GiB at most if that was not asked for, or what
    fills `share.each`. draft: writes drafts; has as many blocks. replicas: engines of the model,
    which divide memory and threads; the plan is each one's. Raises DoesNotFit or UsageError.
    """
    kv_dtype = compiled.kv_dtype(kv_dtype)
    activations = compiled.activations(activations)
    available, budget = memory_budget(memory, what_if, compiled.device_memory)
    threads, own = usable_threads() if threads is None else threads, compiled.program.context
    _check_asked(threads, context, own)
    budget, threads, share = _divided(replicas, budget, threads, share)
    _check_speculation(compiled.program, speculation, draft)
    if not compiled.program.causal:
        return _encoder_plan(
            compiled, name, available, budget, context or own, threads, activations, packed,
            replicas,
        )  # fmt: skip
    sizes = StepLimits(STEP_TOKENS, SEQUENCES, 0)
    options = ProgramOptions(sizes, threads, kv_dtype, packed, activations=activations)
    fixed, block = compiled.footprint(options), compiled.block_bytes(kv_dtype)
    images = (encoder.footprint(threads), encoder.cache_bytes) if encoder else (0, 0)
    beside = draft.footprint(options) if draft else Footprint(0, 0, 0)
    each = block + (draft.compiled.block_bytes(kv_dtype) if draft else 0)
    loaded = fixed.weights + fixed.buffers + beside.weights + beside.buffers
    process = _process(compiled)
    held = loaded + adapters + sum(images) + process
    left, wanted = budget - held, context or own
    needed = (wanted + BLOCK - 1) // BLOCK * each
    if left < needed and (context is not None or left < SMALLEST_CONTEXT // BLOCK * each):
        raise _refusal(name, held, needed, budget, wanted, left, each, replicas)
    own_memory = compiled.device_memory is not None  # which nothing else wants
    cache = left if memory or own_memory else min(left, max(DEFAULT_CACHE, needed))
    if share is not None:
        cache = min(cache, share.cache(left, needed, context is not None))
    blocks = cache // each
    options = replace(options, limits=replace(sizes, blocks=blocks))
    return Plan(
        weights=fixed.weights, buffers=fixed.buffers, cache=blocks * block, block=block,
        available=available, context=min(wanted, blocks * BLOCK), model_context=own,
        threads=threads, kv_dtype=kv_dtype, activations=activations,
        limits=options.limits, adapters=adapters, encoder=images[0], image_cache=images[1],
        packed=packed, draft=draft.plan(options, beside) if draft else None,
        speculation=speculation, vision_dtype=encoder.dtype if encoder else "auto",
        device=compiled.device, process=process,
    )  # fmt: skip


def _check_asked(threads: int, context: int | None, own: int) -> None:
    """Raises UsageError for a number of threads or a context, if one was asked for, that cannot be.

    own: the model's context.
    """
    if not 1 <= threads <= MAX_THREADS:
        raise UsageError(f"--threads {threads} is not between 1 and {MAX_THREADS}")
    if context is not None and not 1 <= context <= own:
        raise UsageError(f"--context {context:,} is not between 1 and the model's {own:,} tokens")


def _divided(
    replicas: int, budget: int, threads: int, share: Share | None
) -> tuple[int, int, Share | None]:
    """What each replica has of the memory and the threads. Raises UsageError for too few."""
    if replicas > threads:
        raise UsageError(
            f"--replicas {replicas} takes {replicas} threads; there are {threads}",
            f"--replicas {threads}",
        )
    if share is not None:
        share = Share(share.total // replicas, share.each // replicas)
    return budget // replicas if share is None else share.total, threads // replicas, share


def _check_speculation(program: Program, speculation: str, draft: CompiledDraft | None) -> None:
    """Raises UsageError for a draft model that would not be used, or is missing."""
    if draft is None and speculation == "draft":
        raise UsageError("--speculation draft needs a draft model", "--draft smollm2")
    if draft is not None and speculation not in ("auto", "draft"):
        raise UsageError(
            f"--speculation {speculation} does not use --draft {draft.path.name}",
            "--speculation auto",
        )
    if draft is not None and program.task != "generate":
        raise UsageError(f"--draft {draft.path.name} is for models that generate text")


def memory_budget(
    asked: str | None, what_if: bool = False, device: DeviceBytes | None = None
) -> tuple[int, int]:
    """Bytes available, on a device if it has memory of its own, and those to plan with. Raises
    DoesNotFit for more than there are."""
    if device is not None:
        return _device_budget(asked, what_if, device.total)
    host = host_memory()
    if asked is None:
        return host.available, int(host.available * DEFAULT_SHARE)
    budget = parse_size(asked, host.available)
    if budget > host.available and not what_if:
        whose = "its control group may use" if host.limit else "this machine has"
        raise DoesNotFit(
            f"--memory {asked} is more than the {size(host.available)} that are available, "
            f"of the {size(host.total)} that {whose}",
            f"--memory {int(host.available * DEFAULT_SHARE) // MIB}MiB",
        )
    return host.available, budget


def _device_budget(asked: str | None, what_if: bool, total: int) -> tuple[int, int]:
    if asked is None and not total:
        raise UsageError("there is no GPU here to plan for: name its memory", "--memory 80GiB")
    budget = int(total * DEVICE_SHARE) if asked is None else parse_size(asked, total)
    if budget > total and not what_if:
        raise DoesNotFit(
            f"--memory {asked} is more than the {size(total)} that the GPU has",
            f"--memory {int(total * DEVICE_SHARE) // MIB}MiB",
        )
    return total, budget


def _process(compiled: Compiled) -> int:
    """Bytes that a process takes beside programs, where they lie."""
    device = compiled.device_memory
    return PROCESS + PAGES if device is None else device.process


def _encoder_plan(
    compiled: Compiled, name: str, available: int, budget: int, context: int, threads: int,
    activations: str, packed: bool, replicas: int,
) -> Plan:  # fmt: skip
    """Encoders compute whole texts in one step, in fp32, and keep nothing for the next."""
    own = compiled.program.context
    tokens = max(STEP_TOKENS, context)
    limits = StepLimits(tokens, tokens, 4 * tokens // BLOCK)
    kv_dtype = compiled.kv_dtype("f32" if compiled.device == "cpu" else "auto")
    options = ProgramOptions(limits, threads, kv_dtype, packed, activations=activations)
    size_of = compiled.footprint(options)
    process = _process(compiled)
    total = size_of.total + process
    if total > budget:
        raise DoesNotFit(
            f"{name} does not fit: weights, buffers and process {size(total)} > {size(budget)}"
            f"{_of_each(replicas)}",
            f"--memory {replicas * total // MIB + 1}MiB",
        )
    return Plan(
        weights=size_of.weights, buffers=size_of.buffers, cache=size_of.cache,
        block=compiled.block_bytes(kv_dtype), available=available, context=context,
        model_context=own, threads=threads, kv_dtype=kv_dtype, activations=activations,
        limits=limits, packed=packed, device=compiled.device, process=process,
    )  # fmt: skip


def _of_each(replicas: int) -> str:
    return f", which is what each of {replicas} replicas has" if replicas > 1 else ""


def _refusal(
    name: str, fixed: int, cache: int, budget: int, context: int, left: int, each: int,
    replicas: int,
) -> DoesNotFit:  # fmt: skip
    fits = left // each * BLOCK
    hints = []
    if fits >= SMALLEST_CONTEXT:
        hints.append(f"--context {fits}")
    hints.append(f"--memory {replicas * (fixed + cache) // MIB + 1}MiB")
    if 0 < (fewer := replicas * budget // (fixed + cache)) < replicas:
        hints.append(f"--replicas {fewer}")
    return DoesNotFit(
        f"{name} does not fit with a {context:,}-token context: weights, buffers and process "
        f"{size(fixed)} + KV cache {size(cache)} ({each // BLOCK / 1024:.1f} KiB a token) "
        f"> {size(budget)}{_of_each(replicas)}",
        *hints,
    )
