"""octavo serve."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from octavo.cli.access import keyring_of, url_of
from octavo.cli.numbers import count
from octavo.cli.options import (
    draft_option,
    models_argument,
    replica_options,
    sizing,
    speculation_option,
)
from octavo.cli.ready import Screen
from octavo.cli.screen import progress_bar, say
from octavo.cli.watching import Watching, watching_options
from octavo.errors import UsageError
from octavo.process import die_with_parent, unmap_freed_blocks

if TYPE_CHECKING:
    from octavo.cli.served import ServedChoice
    from octavo.client.spawned import Spawned
    from octavo.engine.open import OpenModel
    from octavo.engine.plan import Plan
    from octavo.server.registry import Registry
    from octavo.server.source import ModelOptions, NamedSource

DEMO = "smollm2"


@click.command()
@models_argument
@click.option(
    "--models-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Also serve the models of this folder, each loaded when a request names it.",
)
@click.option(
    "--on-demand",
    is_flag=True,
    help="Also serve the models that are here (octavo models), each loaded when it is asked for.",
)
@click.option(
    "--keep-alive",
    metavar="TIME",
    default="-1",
    help="Unload models that nobody has used for so long: 90s, 5m. [only for another model]",
)
@click.option(
    "--pin",
    "pinned",
    multiple=True,
    metavar="MODEL",
    help="Never unload this model (repeatable).",
)
@click.option(
    "--alias",
    "aliases",
    multiple=True,
    metavar="NAME=MODEL",
    help="Serve a model under this name too (repeatable).",
)
@click.option(
    "--host",
    metavar="HOST",
    default="127.0.0.1",
    show_default=True,
    envvar="OCTAVO_HOST",
    help="Address to listen on.",
)
@click.option(
    "--port",
    type=count(0, 65535),
    default=8000,
    show_default=True,
    envvar="OCTAVO_PORT",
    help="Port to listen on; 0 for any that is free.",
)
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    metavar="KEY",
    envvar="OCTAVO_API_KEY",
    help="Require this key (repeatable).",
)
@click.option(
    "--admin-key",
    metavar="KEY",
    envvar="OCTAVO_ADMIN_KEY",
    help="Require this key to load and unload adapters.",
)
@click.option(
    "--keys",
    metavar="FILE|URL",
    envvar="OCTAVO_KEYS",
    help="Require a key of this file or postgresql:// database, which octavo key writes.",
)
@click.option(
    "--limits-url",
    metavar="URL",
    envvar="OCTAVO_LIMITS_URL",
    help="Valkey in which several servers count the limits of keys together: valkey://HOST:6379.",
)
@click.option(
    "--allowed-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Name that clients may call this server by, * for any (repeatable). [any but on loopback]",
)
@click.option(
    "--cors-origin",
    "origins",
    multiple=True,
    metavar="ORIGIN",
    help="Web pages that may call this server: https://app.example.com, * for all (repeatable).",
)
@click.option("--name", metavar="NAME", help="What clients call the model. [its own name]")
@click.option(
    "--chat-template",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Jinja file to use instead of the model's.",
)
@click.option(
    "--max-queue",
    type=count(1, 1 << 16),
    default=256,
    show_default=True,
    help="Requests in flight before new ones get 503.",
)
@click.option(
    "--max-queue-tokens",
    type=count(1, 1 << 31),
    help="Tokens of prompts that wait before new ones get 503. [no limit]",
)
@click.option(
    "--drain-timeout",
    type=count(0, 86_400),
    metavar="SECONDS",
    default=30,
    show_default=True,
    help="Seconds given to running requests at the end.",
)
@click.option(
    "--write-timeout",
    type=count(1, 86_400),
    metavar="SECONDS",
    default=60,
    show_default=True,
    help="Seconds until a stream that is not read is ended.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    envvar="OCTAVO_LOG_LEVEL",
    help="Least of what is logged.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    envvar="OCTAVO_LOG_FORMAT",
    help="Lines to read, or an object a line.",
)
@watching_options
@click.option(
    "--lora",
    "loras",
    multiple=True,
    metavar="NAME=FOLDER",
    help="Serve a LoRA adapter under this name (repeatable).",
)
@click.option(
    "--lora-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Folder from which adapters may be loaded while serving.",
)
@click.option(
    "--lora-memory",
    metavar="SIZE",
    help="Most memory for adapters. [256MiB with --lora or --lora-dir]",
)
@click.option(
    "--data-dir",
    "data",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    envvar="OCTAVO_DATA_DIR",
    help="Folder that keeps stored responses. [one that ends with the server]",
)
@click.option(
    "--packed-cache",
    is_flag=True,
    help="Keep packed weights on disk, and map them at the next start.",
)
@click.option(
    "--generation-config",
    type=click.Choice(["auto", "none"]),
    default="auto",
    show_default=True,
    help="auto: requests default to the sampling parameters that the model's files recommend.",
)
@click.option(
    "--media-domain",
    "domains",
    multiple=True,
    metavar="HOST",
    help="Host from which images may be fetched by URL (repeatable). [none]",
)
@click.option("--parent", type=count(), hidden=True)  # who started it, with which it ends
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser, once it is there.")
@click.option("--no-ui", "ui", flag_value=False, default=True, help="Leave out the page at /.")
@speculation_option
@draft_option
@replica_options
@sizing
def serve(
    models: tuple[str, ...], models_dir: Path | None, on_demand: bool, keep_alive: str,
    pinned: tuple[str, ...], aliases: tuple[str, ...], host: str, port: int,
    api_keys: tuple[str, ...], admin_key: str | None, keys: str | None,
    limits_url: str | None, watching: Watching, hosts: tuple[str, ...], origins: tuple[str, ...],
    domains: tuple[str, ...], drain_timeout: int, write_timeout: int, log_level: str,
    log_format: str, lora_dir: Path | None, offline: bool, data: Path | None, opens: bool,
    ui: bool, parent: int | None, **model: Any,
) -> None:  # fmt: skip
    """Serve MODELS: demo names, Hugging Face ids (org/name[:quant]), folders or .gguf files.

    Several share the memory: those used least recently are unloaded for others.
    """
    if parent is not None:
        die_with_parent(parent)
    if opens and not ui:
        raise UsageError("--open opens the page, which --no-ui leaves out")
    gc.disable()  # collections would look at all that is imported, again and again
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # others would spin, with nothing to do
    finds = models_dir is not None or on_demand
    spawned = _spawn(model, *(models or (() if finds else (DEMO,))))

    from octavo.cli.served import parse_aliases, parse_seconds
    from octavo.generate.fetch import Fetcher
    from octavo.generate.media import MediaPolicy
    from octavo.server.guard import Access
    from octavo.server.logs import logging_to
    from octavo.server.ports import bind
    from octavo.server.run import Models, ServeOptions
    from octavo.server.run import serve as serve_http

    access = Access(host, api_keys, admin_key, hosts, origins, keyring_of(keys, limits_url))
    alive, who = parse_seconds(keep_alive), watching.open()
    media = MediaPolicy(fetcher=Fetcher(domains))
    sock = bind(host, port)
    models = models or (() if finds else _demo())
    choice = _choice(len(models), models_dir, on_demand, lora_dir, offline, **model)
    named = choice.named(models, pinned, tuple(parse_aliases(aliases)), offline, progress_bar)
    opened = {options.name: source.planned() for options, source in named}
    plans = {name: plan for name, (_, plan) in opened.items()}
    _tell_lowered(plans if model["context"] is None else {})
    screen = Screen(
        url_of(host, sock.getsockname()[1]), choice.budget, plans, _titles(named, opened),
        model["replicas"], ui, opens,
    )  # fmt: skip
    find, fetch = choice.find if finds else None, None if offline else choice.fetch
    serving = Models([*named, *choice.find()], choice.budget, len(named), find, fetch)
    options = ServeOptions(
        access, drain_timeout, write_timeout, lora_dir, media, alive, data, who, ui
    )
    size = model["replicas"] * sum(m.checkpoint.nbytes for m, _ in opened.values())
    answering = partial(serve_http, options, serving, sock, ended=screen.count)
    with logging_to(sys.stdout, log_level, log_format):
        _until_signal(answering, screen, named, size, spawned)
    screen.goodbye()


def _until_signal(
    answering: Callable[..., Coroutine[Any, Any, None]], screen: Screen, named: list[NamedSource],
    size: int, spawned: Spawned | None,
) -> None:  # fmt: skip
    """Loads models of `size` bytes and answers."""
    import uvloop

    with ExitStack() as stack:
        advance = stack.enter_context(progress_bar("Loading", size)) if size else None
        for _, source in named:
            source.progress = advance or source.progress
            source.spawned, spawned = spawned, None

        def ready(models: Registry) -> None:
            stack.close()  # the ready block is the last thing printed until the first request
            for _, source in named:
                source.progress = lambda _: None
            screen.ready(models)
            gc.freeze()  # what is imported stays; collections look at requests only
            gc.enable()

        unmap_freed_blocks()
        uvloop.run(answering(ready=ready))


def _spawn(options: dict[str, Any], *models: str) -> Spawned | None:
    """The process of the first model, if any is named: it imports what it needs while this one
    does, which takes as long."""
    from octavo.client.spawned import spawn

    first = "/0" if options["replicas"] > 1 else ""
    return spawn((options["name"] or Path(models[0]).name) + first) if models else None


def _demo() -> tuple[str]:
    from octavo.checkpoint.hub import DEMOS

    say(f"No model named, so using the demo: {DEMO} ({DEMOS[DEMO].title})")
    return (DEMO,)


def _tell_lowered(plans: dict[str, Plan]) -> None:
    """Says which contexts are shorter than the models' own."""
    for name, plan in plans.items():
        if plan.context < plan.model_context:
            full, given = plan.model_context, plan.context
            of = f" of {name}" * (len(plans) > 1)
            say(f"context{of} lowered from {full:,} to {given:,} to fit; --context sets it")


def _titles(named: list[NamedSource], opened: dict[str, tuple[OpenModel, Plan]]) -> dict[str, str]:
    return {options.name: _title(options, opened[options.name][0]) for options, _ in named}


def _title(options: ModelOptions, opened: OpenModel) -> str:
    from octavo.checkpoint.hub import BUNDLED, DEMOS

    known = (DEMOS | BUNDLED).get(options.located.name)
    return known.title if known is not None else opened.checkpoint.architecture


def _choice(
    count: int, models_dir: Path | None, on_demand: bool, lora_dir: Path | None, offline: bool, *,
    name: str | None, chat_template: Path | None, max_queue: int, max_queue_tokens: int | None,
    loras: tuple[str, ...],
    lora_memory: str | None, packed_cache: bool, generation_config: Literal["auto", "none"],
    memory: str | None, context: int | None, threads: int | None, kv_dtype: str, activations: str,
    speculation: str, draft: str | None, mmproj: str, vision_dtype: str, device: str,
    replicas: int, routing: str,
) -> ServedChoice:  # fmt: skip
    """What is served, as the options about models say. Raises UsageError."""
    from octavo.backends import resolve_device
    from octavo.checkpoint.hub import Located, locate
    from octavo.cli.options import parse_adapters
    from octavo.cli.served import ServedChoice, read_template
    from octavo.client.load import QueueLimits
    from octavo.engine.host import available_memory
    from octavo.engine.open import open_draft
    from octavo.engine.plan import parse_size
    from octavo.server.source import ModelOptions

    one = {
        "--name": name, "--chat-template": chat_template, "--lora": loras, "--draft": draft,
        "--mmproj": "" if mmproj in ("auto", "none") else mmproj,
    }  # fmt: skip
    for option, given in one.items():
        if given and (count != 1 or models_dir is not None or on_demand):
            raise UsageError(f"{option} is about one model; {count} are named, or a folder")
    template = read_template(chat_template) if chat_template is not None else None
    lora_bytes = 0
    if loras or lora_dir or lora_memory:
        lora_bytes = parse_size(lora_memory or "256MiB", available_memory(), "--lora-memory")
    like = ModelOptions(
        Located(Path(), ""), name or "", (), template, QueueLimits(max_queue, max_queue_tokens),
        parse_adapters(loras), lora_bytes > 0, generation_config, mmproj=mmproj,
        vision_dtype=vision_dtype, device=resolve_device(device), replicas=replicas,
        routing=routing,
    )  # fmt: skip
    small = locate(draft, offline=offline, progress=progress_bar) if draft else None
    sizing = {
        "context": context, "threads": threads, "kv_dtype": kv_dtype, "activations": activations,
        "adapters": lora_bytes, "packed": packed_cache, "speculation": speculation,
        "draft": open_draft(small.path, like.device) if small else None, "replicas": replicas,
    }  # fmt: skip
    return ServedChoice(like, sizing, memory, models_dir, on_demand)
