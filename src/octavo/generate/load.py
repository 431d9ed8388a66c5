"""Loads a model into this process."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypedDict, Unpack

from octavo.backends import resolve_device
from octavo.checkpoint.hub import Located, locate, no_progress
from octavo.checkpoint.progress import ProgressBar
from octavo.client.in_process import InProcessClient
from octavo.engine.defaults import GenerationConfig
from octavo.engine.host import available_memory
from octavo.engine.loader import load_engine
from octavo.engine.open import OpenModel, open_draft, open_model
from octavo.engine.plan import Plan, make_plan, parse_size
from octavo.errors import UsageError
from octavo.generate.model import ServedModel
from octavo.generate.options import check_names
from octavo.generate.served import served_model, token_table
from octavo.text import ChatTemplate, load_tokenizer
from octavo.text.chat import template_source

KV_DTYPES = ("auto", "bf16", "int8", "f32")
ACTIVATIONS = ("auto", "int8", "int16")
VISION_DTYPES = ("auto", "int8")
SPECULATIONS = ("auto", "lookup", "draft", "self", "off")
Chosen = Literal["kv_dtype", "activations", "vision_dtype", "speculation"]
_CHOICES: tuple[tuple[Chosen, tuple[str, ...]], ...] = (
    ("kv_dtype", KV_DTYPES),
    ("activations", ACTIVATIONS),
    ("vision_dtype", VISION_DTYPES),
    ("speculation", SPECULATIONS),
)


class LoadOptions(TypedDict, total=False):
    """How to load a model.

    memory: a ceiling such as "8GiB" or "50%". context: most tokens of a sequence. kv_dtype:
    "bf16", "int8", "f32", or "auto", which is f32 for mixtures of experts and bf16 for others.
    activations: how inputs of quantized linear layers are rounded: "int16" (two bytes a value),
    "int8" (one, and a scale for 32), or "auto" (the default), two bytes where one would show.
    adapters: LoRA adapters by name, {} for none yet; they take at most lora_memory. packed_cache:
    keep packed weights on disk for the next start. generation_config: "none" forgets the sampling
    parameters that the model's files recommend. speculation: which drafts of what may come next are
    verified, where that saves time: "lookup" those found in texts, "draft" those of the model
    `draft`, "auto" both, "self" those of the model without some layers (`octavo tune`), "off" none.
    mmproj: the file with the image encoder of a .gguf model, "auto" for one beside it, "none".
    vision_dtype: "int8" rounds the image encoder's layers and their inputs to 8 bits, "auto" leaves
    it as it is stored. device: what computes, "cpu" (the default), "cuda" (a GPU), "cuda:1", or
    "auto", a GPU where one can be used. loading: opens a progress bar, given what it is for and how
    many bytes.
    """

    memory: str | None
    context: int | None
    threads: int | None
    kv_dtype: str
    activations: str
    offline: bool
    chat_template: str | None
    adapters: dict[str, str] | None
    lora_memory: str
    packed_cache: bool
    generation_config: GenerationConfig
    speculation: str
    draft: str | None
    mmproj: str
    vision_dtype: str
    device: str
    loading: ProgressBar


def check_choices(options: LoadOptions) -> None:
    """Raises UsageError for an option that is none of its values."""
    for choice, known in _CHOICES:
        if (given := options.get(choice, "auto")) not in known:
            raise UsageError(f"{choice} {given!r}; it may be {' or '.join(known)}")


def load(model: str, **options: Unpack[LoadOptions]) -> ServedModel:
    """A model (demo name, Hugging Face id, folder or .gguf) with an engine in this process.

    Raises OctavoError when it cannot be found, read or fitted.
    """
    check_names(options, LoadOptions)
    check_choices(options)
    loading, adapters = options.get("loading", no_progress), options.get("adapters")
    located = locate(model, offline=options.get("offline", False), progress=loading)
    mmproj, vision_dtype = options.get("mmproj", "auto"), options.get("vision_dtype", "auto")
    device = resolve_device(options.get("device", "cpu"))
    opened = open_model(located.path, adapters is not None, None, mmproj, vision_dtype, device)
    tokenizer = load_tokenizer(opened.checkpoint)
    table = token_table(tokenizer)
    source = options.get("chat_template") or template_source(opened.checkpoint)
    template = ChatTemplate(source, tokenizer) if source else None
    plan = _plan(opened, located, options, device)
    opened = open_model(
        located.path, adapters is not None, plan.context, opened.mmproj, vision_dtype, device
    )
    with loading("Loading", opened.checkpoint.nbytes) as advance:
        client = InProcessClient(load_engine(opened, plan, table, advance))
    try:
        for name, folder in (adapters or {}).items():
            client.load(name, Path(folder))
        if template is not None:
            template.check()
        return served_model(
            opened, located, tokenizer, table, template, client, plan.context,
            options.get("generation_config", "auto"),
        )  # fmt: skip
    except BaseException:
        client.stop()
        raise


def _plan(opened: OpenModel, located: Located, options: LoadOptions, device: str) -> Plan:
    """The plan of a model. Raises OctavoError."""
    adapters, draft = options.get("adapters"), options.get("draft")
    lora = parse_size(options.get("lora_memory", "256MiB"), available_memory())
    offline, progress = options.get("offline", False), options.get("loading", no_progress)
    return make_plan(
        opened.compiled,
        name=located.name,
        memory=options.get("memory"),
        context=options.get("context"),
        threads=options.get("threads"),
        kv_dtype=options.get("kv_dtype", "auto"),
        activations=options.get("activations", "auto"),
        packed=options.get("packed_cache", False),
        adapters=lora if adapters is not None else 0,
        encoder=opened.encoder,
        speculation=options.get("speculation", "auto"),
        draft=open_draft(locate(draft, offline=offline, progress=progress).path, device)
        if draft
        else None,
    )
