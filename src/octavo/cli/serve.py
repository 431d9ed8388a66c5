"""octavo serve."""

from __future__ import annotations

import json
import shlex
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from octavo import __version__
from octavo.cli.options import count, model_argument, sizing, speculation_option
from octavo.cli.screen import progress_bar, say

if TYPE_CHECKING:
    import socket

    from octavo.client.process import EngineProcessClient
    from octavo.engine.loader import OpenModel
    from octavo.engine.plan import Plan
    from octavo.generate.model import ServedModel
    from octavo.server.exchange import Exchange
    from octavo.server.run import ModelOptions, ServeOptions

DEMO = "smollm2"


class Screen:
    """What the terminal shows: phases while loading, the ready block, then a line per request."""

    def __init__(self, url: str, plan: Plan, title: str) -> None:
        self._url, self._plan, self._title = url, plan, title
        self._began = time.monotonic()
        self.requests = self.tokens = self.errors = 0

    def ready(self, client: EngineProcessClient, served: ServedModel) -> None:
        from octavo.engine.plan import size

        plan = self._plan
        parts = [
            f"{size(plan.weights)} weights", f"{size(plan.buffers)} buffers",
            f"{size(plan.cache)} KV cache", f"{size(plan.process)} process",
        ]  # fmt: skip
        if plan.adapters:
            parts.insert(3, f"{size(plan.adapters)} adapters")
        seconds = time.monotonic() - self._began
        lines = [
            "",
            f"Octavo {__version__}   ready in {seconds:.1f} s",
            f"  model     {served.name}",
            f"            {self._title}",
            f"  kernels   {client.isa}, {plan.threads} thread{'s' * (plan.threads > 1)}, "
            f"activations {plan.activations}",
            f"  memory    {size(plan.total)} at most, of {size(plan.available)} available",
            f"            = {' + '.join(parts[:2])}",
            f"            + {' + '.join(parts[2:])}",
            f"  capacity  {plan.tokens:,} tokens = {plan.tokens / plan.context:.1f} requests",
            f"            at the full {plan.context:,} context",
            f"  API       {self._url}/v1",
            f"  metrics   {self._url}/metrics",
            "",
            *self._example(served),
        ]
        say("\n".join(lines))

    def _example(self, served: ServedModel) -> list[str]:
        """A request to paste."""
        route, *fields = {
            "generate": (
                "chat/completions",
                '"messages":[{"role":"user",',
                '  "content":"What is the capital of France?"}]',
            ),
            "embed": ("embeddings", '"input":"What is the capital of France?"'),
            "rank": ("rerank", '"query":"capital of France",', '"documents":["Paris","Rome"]'),
        }[served.task]
        if served.task == "generate" and served.template is None:
            route, fields = "completions", ['"prompt":"The capital of France is"']
        body = "\n    ".join([f'{{"model":{json.dumps(served.name)},', *fields]) + "}"
        return [f"  curl {self._url}/v1/{route} \\", f"    -d {shlex.quote(body)}"]

    def count(self, one: Exchange) -> None:
        if one.usage is not None:
            self.requests += 1
            self.tokens += one.usage.completion
            self.errors += one.status >= 500

    def goodbye(self) -> None:
        say(f"served {self.requests} requests, {self.tokens:,} tokens, {self.errors} errors; bye")


@click.command()
@model_argument(required=False)
@click.option(
    "--host",
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
    metavar="N",
    envvar="OCTAVO_PORT",
    help="Port to listen on; 0 for any that is free.",
)
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar="OCTAVO_API_KEY",
    help="Require this key (repeatable).",
)
@click.option(
    "--admin-key",
    envvar="OCTAVO_ADMIN_KEY",
    help="Require this key to load and unload adapters.",
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
@click.option("--name", help="What clients call the model. [its own name]")
@click.option(
    "--chat-template",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Jinja file to use instead of the model's.",
)
@click.option(
    "--max-queue",
    type=count(1, 1 << 16),
    metavar="N",
    default=256,
    show_default=True,
    help="Requests in flight before new ones get 503.",
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
    help="Folder from which adapters may be loaded while serving.",
)
@click.option(
    "--lora-memory",
    metavar="SIZE",
    help="Most memory for adapters. [256MiB with --lora or --lora-dir]",
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
@speculation_option
@sizing
def serve(
    model: str | None, host: str, port: int, api_keys: tuple[str, ...], admin_key: str | None,
    hosts: tuple[str, ...], origins: tuple[str, ...], name: str | None,
    chat_template: Path | None, max_queue: int, drain_timeout: int, write_timeout: int,
    log_level: str, log_format: str, loras: tuple[str, ...],
    lora_dir: Path | None, lora_memory: str | None, packed_cache: bool, memory: str | None,
    context: int | None, threads: int | None, kv_dtype: str, activations: str, offline: bool,
    generation_config: Literal["auto", "none"], domains: tuple[str, ...], speculation: str,
) -> None:  # fmt: skip
    """Serve MODEL: a demo name, a Hugging Face id (org/name[:quant]), a folder or a .gguf file."""
    from octavo.checkpoint.hub import DEMOS, locate
    from octavo.cli.options import parse_adapters
    from octavo.engine.host import available_memory
    from octavo.engine.loader import open_model
    from octavo.engine.plan import make_plan, parse_size
    from octavo.server.guard import Access
    from octavo.server.ports import bind

    access = Access(host, api_keys, admin_key, hosts, origins)
    sock = bind(host, port)
    if model is None:
        model = DEMO
        say(f"No model named, so using the demo: {DEMO} ({DEMOS[DEMO].title})")
    located = locate(model, offline=offline, progress=progress_bar)
    adapters = parse_adapters(loras)
    lora_bytes = 0
    if loras or lora_dir or lora_memory:
        lora_bytes = parse_size(lora_memory or "256MiB", available_memory(), "--lora-memory")
    opened = open_model(located.path, lora_bytes > 0)
    plan = make_plan(
        opened.compiled, name=located.name, memory=memory, context=context, threads=threads,
        kv_dtype=kv_dtype, activations=activations, adapters=lora_bytes, packed=packed_cache,
        encoder=opened.encoder,
        speculation=speculation,
    )  # fmt: skip
    if context is None and plan.context < plan.model_context:
        full, given = plan.model_context, plan.context
        say(f"context lowered from {full:,} to {given:,} to fit; --context sets it")
    from octavo.generate.media import MediaPolicy
    from octavo.server.logs import logging_to
    from octavo.server.run import ModelOptions, ServeOptions

    template = chat_template.read_text() if chat_template else None
    media = MediaPolicy(domains=tuple(domain.lower() for domain in domains))
    options = ServeOptions(access, drain_timeout, write_timeout, lora_dir, media)
    wanted = ModelOptions(
        located, name or located.name, plan, template, max_queue, adapters, generation_config
    )
    title = DEMOS[model].title if model in DEMOS else opened.checkpoint.architecture
    shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host
    screen = Screen(f"http://{shown}:{sock.getsockname()[1]}", plan, title)
    with logging_to(sys.stdout, log_level, log_format):
        _run(options, wanted, opened, sock, screen)
    screen.goodbye()


def _run(
    options: ServeOptions, wanted: ModelOptions, opened: OpenModel, sock: socket.socket,
    screen: Screen,
) -> None:  # fmt: skip
    import uvloop

    from octavo.server.run import serve as serve_http

    with ExitStack() as stack:
        advance = stack.enter_context(progress_bar("Loading", opened.checkpoint.nbytes))

        def ready(client: EngineProcessClient, served: ServedModel) -> None:
            stack.close()  # the ready block is the last thing printed until the first request
            screen.ready(client, served)

        uvloop.run(
            serve_http(
                options, wanted, opened, sock, progress=advance, ready=ready, ended=screen.count
            )
        )
