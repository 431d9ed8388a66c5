"""The `octavo` command: finds subcommands without importing them, and prints errors as one line."""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

import click

from octavo import __version__

if TYPE_CHECKING:
    from octavo.errors import OctavoError

COMMANDS = {
    "serve": ("octavo.cli.serve", "Serve models over HTTP (the demo model if none is named)."),
    "gateway": ("octavo.cli.gateway", "Answer for any number of servers, at one address."),
    "simulate": (
        "octavo.cli.simulate",
        "Serve an engine that computes nothing, for planning.",
    ),
    "chat": ("octavo.cli.chat", "Talk to a model in the terminal."),
    "generate": ("octavo.cli.generate", "Complete a prompt."),
    "batch": ("octavo.cli.batch", "Answer a file of requests."),
    "pull": ("octavo.cli.pull", "Fetch a model."),
    "models": ("octavo.cli.models", "List the models on this machine."),
    "rm": ("octavo.cli.rm", "Delete a model from the cache."),
    "ps": ("octavo.cli.ps", "List the servers that run on this machine."),
    "top": ("octavo.cli.top", "Watch a server: tokens, queue, memory, requests."),
    "show": ("octavo.cli.show", "Describe a model; --program lists its operations."),
    "release": ("octavo.cli.release", "Bring a new version of a model in, step by step."),
    "experiment": ("octavo.cli.experiment", "Compare variants of a model on real requests."),
    "config": ("octavo.cli.config", "Show the configurations of a gateway, and go back to one."),
    "plan": ("octavo.cli.plan", "Say how much memory a model takes, before loading it."),
    "quantize": ("octavo.cli.quantize", "Make a model small, as a new file or folder."),
    "evaluate": ("octavo.cli.evaluate", "Measure what a smaller model has lost."),
    "convert": ("octavo.cli.convert", "Write a model in another format: GGUF, or a folder."),
    "merge": ("octavo.cli.merge", "Write a model with LoRA adapters merged into its weights."),
    "metrics": ("octavo.cli.metrics", "Print rules and a dashboard for a server's metrics."),
    "doctor": ("octavo.cli.doctor", "Describe this machine, or say what is wrong with a server."),
    "profile": ("octavo.cli.profile", "Say where the time of a request goes, and draw it."),
    "tune": ("octavo.cli.tune", "Find what drafts of a model can do without."),
    "bench": ("octavo.cli.bench", "Measure speed on this machine."),
    "key": ("octavo.cli.key", "Create, list and revoke the API keys of a server."),
    "usage": ("octavo.cli.key", "Show what each API key has used."),
    "replica": ("octavo.cli.replica", "List, drain and restart the replicas of a server."),
    "route": ("octavo.cli.replica", "Say why requests went where they went."),
    "completion": ("octavo.cli.completion", "Print a script that completes commands with Tab."),
}
WRITERS = ("quantize", "convert", "merge")  # which remove what they have half written
ALIASES = {"run": "chat", "list": "models", "ls": "models"}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *ALIASES]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        name = ALIASES.get(name, name)
        if name not in COMMANDS:
            return None
        command = getattr(import_module(COMMANDS[name][0]), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            from difflib import get_close_matches

            from octavo.errors import UsageError

            close = get_close_matches(args[0], self.list_commands(ctx), 3)
            hints = [_join(["octavo", name, *args[1:]]) for name in close]
            raise UsageError(f"no command {args[0]!r}", *(hints or ["octavo --help"]))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as e:  # click ends without a word
            if _is_read():
                from octavo.errors import OctavoError

                raise OctavoError(e.strerror or "broken pipe") from e
            _broken_pipe()

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        def also(name: str) -> str:
            return ", ".join([name, *(a for a, c in ALIASES.items() if c == name)])

        with formatter.section("Commands"):
            formatter.write_dl([(also(name), text) for name, (_, text) in COMMANDS.items()])


def _version(ctx: click.Context, _: Any, wanted: bool) -> None:
    if wanted:
        click.echo(f"octavo {__version__}")
        ctx.exit()


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Print the version.",
)
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def cli(debug: bool) -> None:
    """Serve language models from an ordinary computer, exactly."""


def _typed() -> list[str]:
    """The command as it was typed, with variables in place of the values of keys."""
    words = ["octavo", *sys.argv[1:]]
    for i, word in enumerate(words):
        option, equals, _ = word.partition("=")
        if option.endswith("-key") and option.startswith("--"):
            key = f"$OCTAVO_{option[2:].replace('-', '_').upper()}"
            if equals:
                words[i] = f"{option}={key}"
            else:
                words[i + 1 : i + 2] = [key]
    return words


def _join(words: list[str]) -> str:
    return " ".join(w if "$OCTAVO_" in w else shlex.quote(w) for w in words)


def _paste(hint: str) -> str:
    """A suggestion as a complete command: options or a variable are added to the typed command,
    in place of those that are there."""
    if re.match(r"[A-Z_]+=\S*$", hint):
        return f"{hint} {_join(_typed())}"
    if not hint.startswith("--"):
        return hint
    words = _typed()
    for option in (part for part in hint.split() if part.startswith("--")):
        for i, word in enumerate(words):
            if word == option or word.startswith(option + "="):
                del words[i : i + (1 if "=" in word else 2)]
                break
    return f"{_join(words)} {hint}"


def _hints(e: OctavoError) -> list[str]:
    """Commands to try: the typed one with another model, then whatever the error suggests."""
    from octavo.errors import ModelNotFound

    instead = []
    if isinstance(e, ModelNotFound):
        for model in e.instead:
            words = [model if w == e.model else w for w in _typed()]
            typed = model in words and words != _typed()
            instead.append(_join(words if typed else ["octavo", "serve", model]))
    return [*instead, *(_paste(hint) for hint in e.suggestions)]


def _misused(e: click.ClickException) -> NoReturn:
    """Ends with click's message, the variable that a bad value came from, and where to read on."""
    message, hints = e.format_message(), []
    if isinstance(e, click.UsageError) and e.ctx is not None:
        hints = [_join(["octavo", *e.ctx.command_path.split()[1:], "--help"])]
        param = getattr(e, "param", None)
        if isinstance(param, click.Option) and param.name and isinstance(param.envvar, str):
            source = e.ctx.get_parameter_source(param.name)
            if source == click.core.ParameterSource.ENVIRONMENT:
                message += f" It is the value of {param.envvar}."
    _fail(message, hints, e.exit_code)


def _fail(message: str, hints: list[str], code: int) -> NoReturn:
    from octavo.cli.screen import say

    say(f"error: {message}", err=True)
    for hint in hints:
        say(f"  try: {hint}", err=True)
    sys.exit(code)


def _is_read() -> bool:
    """Whether what is printed still has a reader; True where that is not known."""
    try:
        output = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):
        return True
    poll = select.poll()
    poll.register(output, 0)  # errors are always told
    return not poll.poll(0)


def _broken_pipe() -> NoReturn:
    """Exits silently after a broken pipe, before the interpreter flushes to it once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def main() -> None:
    """Runs the command line; exit codes are listed in docs/cli.md."""
    from octavo.errors import OctavoError

    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if stream is not None:  # it was closed
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    debug = "--debug" in sys.argv
    if next((word for word in sys.argv[1:] if word[:1] != "-"), None) in WRITERS:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    try:
        code = cli.main(prog_name="octavo", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)  # --help and --version
    except click.exceptions.Exit as e:
        sys.exit(e.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except click.exceptions.NoArgsIsHelpError as e:
        e.show()
        sys.exit(2)
    except click.ClickException as e:
        _misused(e)
    except BrokenPipeError:
        _broken_pipe()
    except OctavoError as e:
        if debug:
            raise
        _fail(str(e), _hints(e), e.exit_code)
    except OSError as e:
        if debug or e.errno is None:
            raise
        _fail(": ".join(str(part) for part in (e.filename, e.strerror) if part), [], 1)


if __name__ == "__main__":
    main()
