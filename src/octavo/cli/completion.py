"""octavo completion."""

from __future__ import annotations

import click

from octavo.cli.screen import say


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that completes commands, options and models with Tab.

    \b
    bash: octavo completion bash > ~/.local/share/bash-completion/completions/octavo
    zsh:  octavo completion zsh > ~/.zfunc/_octavo       (a folder of $fpath)
    fish: octavo completion fish > ~/.config/fish/completions/octavo.fish
    """
    from click.shell_completion import get_completion_class

    from octavo.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    say(kind(cli, {}, "octavo", "_OCTAVO_COMPLETE").source())
