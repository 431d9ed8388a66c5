"""Options shared by several commands, and the types of their values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from octavo.cli.numbers import Number, count
from octavo.cli.screen import say

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from octavo.engine.request import SamplingParams

F = TypeVar("F", bound=Callable[..., Any])
POLICIES = ("cost", "least-load", "round-robin", "prefix-hash", "random")  # of balance/policies.py


def _complete_model(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Completes the names of models in the cache, then files."""
    from click.shell_completion import CompletionItem

    from octavo.checkpoint.hub import names

    found = [CompletionItem(name) for name in names() if name.startswith(incomplete)]
    return found or [CompletionItem(incomplete, type="file")]


def model_argument(**attributes: Any) -> Callable[[F], F]:
    """The argument MODEL, with completion."""
    return click.argument("model", shell_complete=_complete_model, **attributes)


def together(*options: Callable[[F], F]) -> Callable[[F], F]:
    """One decorator of several options, which are shown in their order."""

    def decorated(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorated


# The argument MODELS, with completion.
models_argument = click.argument("models", nargs=-1, shell_complete=_complete_model)


def json_flag(command: F) -> F:
    """--json, as the parameter `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def _few_cpus(ctx: click.Context, param: click.Parameter, threads: int | None) -> int | None:
    if threads is None:
        return None
    from octavo.engine.host import usable_threads

    if threads > (cpus := usable_threads()):
        say(f"--threads {threads}: this process has {cpus}; more threads are slower", err=True)
    return threads


threads_option = click.option(
    "--threads", type=count(1, 256), envvar="OCTAVO_THREADS", callback=_few_cpus,
    help="CPU threads. [all this process may use]",
)  # fmt: skip

offline_option = click.option(
    "--offline", is_flag=True, envvar="OCTAVO_OFFLINE",
    help="Use only models that are already here.",
)  # fmt: skip

activations_option = click.option(
    "--activations", type=click.Choice(["auto", "int8", "int16"]), default="auto",
    envvar="OCTAVO_ACTIVATIONS",
    help="Precision of what quantized layers read. [auto: two bytes where one would show]",
)  # fmt: skip

kv_dtype_option = click.option(
    "--kv-dtype", type=click.Choice(["auto", "bf16", "int8", "f32"]), default="auto",
    envvar="OCTAVO_KV_DTYPE",
    help="Precision of cached keys and values. [bf16; f32 for mixtures of experts]",
)  # fmt: skip

mmproj_option = click.option(
    "--mmproj", metavar="FILE", default="auto", envvar="OCTAVO_MMPROJ",
    help="Image encoder of a .gguf model; none: text only. [mmproj*.gguf beside it]",
)  # fmt: skip

device_option = click.option(
    "--device", metavar="DEVICE", default="cpu", show_default=True, envvar="OCTAVO_DEVICE",
    help="What computes: cpu, cuda (a GPU; experimental), cuda:1, or auto: a GPU if one answers.",
)  # fmt: skip

vision_dtype_option = click.option(
    "--vision-dtype", type=click.Choice(["auto", "int8"]), default="auto",
    envvar="OCTAVO_VISION_DTYPE",
    help="Precision of the image encoder, inputs of its layers too. [as it is stored]",
)  # fmt: skip

speculation_option = click.option(
    "--speculation", type=click.Choice(["auto", "lookup", "draft", "self", "off"]), default="auto",
    show_default=True, envvar="OCTAVO_SPECULATION",
    help="Which drafts of what may come next are verified, where that saves time: those found in "
    "texts (lookup), those of --draft, both (auto), or the model's own (self; see octavo tune).",
)  # fmt: skip

draft_option = click.option(
    "--draft", metavar="MODEL", envvar="OCTAVO_DRAFT", shell_complete=_complete_model,
    help="A smaller model, which drafts what the model verifies. The text stays the same.",
)  # fmt: skip

sizing = together(
    click.option(
        "--memory", metavar="SIZE", envvar="OCTAVO_MEMORY",
        help="Most memory to use: 8GiB, 75%. [80% of what is available]",
    ),
    click.option(
        "--context", type=count(), envvar="OCTAVO_CONTEXT",
        help="Most tokens of a conversation. [the model's own, or what fits]",
    ),
    threads_option,
    kv_dtype_option,
    activations_option,
    mmproj_option,
    vision_dtype_option,
    device_option,
    offline_option,
)  # fmt: skip

replica_options = together(
    click.option(
        "--replicas", type=count(1, 64), default=1, show_default=True,
        help="Engines of each model (1 to 64), which divide memory and threads; one may fail "
        "unnoticed.",
    ),
    click.option(
        "--routing", default="cost", show_default=True,
        type=click.Choice(POLICIES),
        help="How one of them is chosen for a request.",
    ),
)  # fmt: skip

# The command gets those that were given, as keywords; `sampled` makes parameters of them.
sampling = together(
    click.option(
        "--temperature", type=Number(0, 2),
        help="How freely tokens are drawn (0 to 2). 0: always the likeliest.",
    ),
    click.option(
        "--top-p", type=Number(0, 1, above=True),
        help="Draw from the likeliest tokens whose probabilities add up to this. 1: from all.",
    ),
    click.option(
        "--top-k", type=count(0), help="Draw from so many of the likeliest tokens. 0: from all."
    ),
    click.option(
        "--min-p", type=Number(0, 1),
        help="Least probability of a token, as a share of the likeliest's. 0: any.",
    ),
    click.option(
        "--repeat-penalty", "--repetition-penalty", "repetition_penalty",
        type=Number(0, 10, above=True),
        help="How much less likely tokens become that were there before. 1: not at all.",
    ),
    click.option(
        "--seed", type=count(-(1 << 63), (1 << 63) - 1),
        help="The same seed draws the same tokens. [another each time]",
    ),
    click.option("--max-tokens", type=count(), help="Most tokens of the answer."),
)  # fmt: skip


def sampled(defaults: SamplingParams, given: dict[str, Any]) -> SamplingParams:
    """The model's default sampling parameters, changed by the given options."""
    import msgspec

    return msgspec.structs.replace(defaults, **{k: v for k, v in given.items() if v is not None})


def parse_adapters(given: tuple[str, ...]) -> tuple[tuple[str, Path], ...]:
    """Parses NAME=FOLDER options. Raises UsageError."""
    from octavo.errors import UsageError

    out = []
    for text in given:
        name, equals, folder = text.partition("=")
        if not equals or not name or not Path(folder).is_dir():
            raise UsageError(
                f"--lora {text!r} is not NAME=FOLDER", "--lora german=./adapters/german"
            )
        out.append((name, Path(folder).resolve()))
    return tuple(out)
