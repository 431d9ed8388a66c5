"""The `octavo` command: finds subcommands without importing them, and prints errors as one line."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import click

COMMANDS = {
    "serve": ("octavo.cli.serve", "Serve a model over HTTP (the demo model if none is named)."),
    "chat": ("octavo.cli.chat", "Talk to a model in the terminal."),
    "generate": ("octavo.cli.generate", "Complete a prompt."),
    "pull": ("octavo.cli.pull", "Fetch a model."),
    "models": ("octavo.cli.models", "List the models on this machine."),
    "show": ("octavo.cli.show", "Describe a model; --program lists its operations."),
    "plan": ("octavo.cli.plan", "Say how much memory a model takes, before loading it."),
    "doctor": ("octavo.cli.doctor", "Describe this machine, ready to paste."),
    "bench": ("octavo.cli.bench", "Measure."),
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = getattr(import_module(COMMANDS[name][0]), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _version(ctx: click.Context, _: Any, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        click.echo(f"octavo {version('octavo')}")
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


def _paste(hint: str) -> str:
    """An option alone becomes the command that was typed, with that option."""
    if not hint.startswith("--"):
        return hint
    option = hint.split()[0]
    words = ["octavo", *sys.argv[1:]]
    for i, word in enumerate(words):
        if word == option or word.startswith(option + "="):
            del words[i : i + (1 if "=" in word else 2)]
            break
    return " ".join([*words, hint])


def main() -> None:
    """Runs the command line; exit codes are listed in docs/cli.md."""
    from octavo.errors import OctavoError

    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Exit as e:
        sys.exit(e.exit_code)
    except click.Abort:
        sys.exit(130)
    except KeyboardInterrupt:
        sys.exit(130)
    except click.ClickException as e:
        e.show()
        sys.exit(e.exit_code)
    except BrokenPipeError:
        sys.exit(0)
    except OctavoError as e:
        if "--debug" in sys.argv:
            raise
        click.echo(f"error: {e}", err=True)
        for hint in e.suggestions:
            click.echo(f"  try: {_paste(hint)}", err=True)
        sys.exit(e.exit_code)


if __name__ == "__main__":
    main()
