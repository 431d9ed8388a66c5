"""octavo chat."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from octavo.cli.options import progress_bar, sizing

if TYPE_CHECKING:
    from octavo.llm import LLM

HELP = '''/help            this
/system TEXT     begin again with a system message
/reset           begin again
/save FILE       write the conversation as JSON
/exit            leave (or Ctrl-D)
"""              begins and ends a message of several lines
Ctrl-C           stops the answer, not the program'''


class Conversation:
    """Messages so far, and how to go on."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.messages: list[dict[str, str]] = []

    def answer(self, text: str) -> None:
        """Streams the answer to `text`; an interrupted one is kept as far as it came."""
        from octavo.errors import RequestError

        self.messages.append({"role": "user", "content": text})
        try:
            prompt = self._llm.encode_chat(self.messages)
            said = self._stream(prompt)
        except RequestError as e:
            self.messages.pop()
            click.echo(f"error: {e}", err=True)
            return
        self.messages.append({"role": "assistant", "content": said})

    def _stream(self, prompt: list[int]) -> str:
        said, began, first, pieces = "", time.monotonic(), 0.0, 0
        try:
            for piece in self._llm.stream(prompt):
                first = first or time.monotonic()
                pieces += 1
                said += piece
                click.echo(piece, nl=False)
                sys.stdout.flush()
        except KeyboardInterrupt:
            click.echo(" (stopped)", nl=False)
        click.echo()
        if sys.stdout.isatty() and pieces > 1:
            used = len(prompt) + pieces
            speed = (pieces - 1) / max(time.monotonic() - first, 1e-9)
            room = self._llm.plan.context
            times = f"{first - began:.2f} s to first · {speed:.0f} tok/s"
            click.secho(f"{self._llm.name} · {used}/{room} tokens · {times}", dim=True)
        return said

    def command(self, line: str) -> bool:
        """Obeys a /command. False ends the program."""
        word, _, rest = line.partition(" ")
        if word in ("/exit", "/quit", "/bye"):
            return False
        if word == "/reset":
            self.messages = []
        elif word == "/system":
            self.messages = [{"role": "system", "content": rest}]
        elif word == "/save" and rest:
            try:
                Path(rest).write_text(json.dumps(self.messages, ensure_ascii=False, indent=2))
                click.echo(f"saved {len(self.messages)} messages to {rest}")
            except OSError as e:
                click.echo(f"error: cannot write {rest}: {e.strerror}", err=True)
        else:
            click.echo(HELP)
        return True


def _read() -> str | None:
    """A message: a line, or lines between triple quotes. None at the end of input."""
    try:
        line = input(">>> ")
        if not line.lstrip().startswith('"""'):
            return line.strip()
        lines = [line.lstrip()[3:]]
        while not lines[-1].rstrip().endswith('"""'):
            lines.append(input("... "))
        lines[-1] = lines[-1].rstrip()[:-3]
        return "\n".join(lines).strip()
    except EOFError:
        click.echo()
        return None
    except KeyboardInterrupt:
        click.echo("  (/exit or Ctrl-D leaves)")
        return ""


@click.command()
@click.argument("model", default="smollm2")
@click.option(
    "-p", "--prompt", help="Answer this and end. [standard input when it is not a terminal]"
)
@click.option("--system", help="A system message.")
@sizing
def chat(
    model: str, prompt: str | None, system: str | None, memory: str | None, context: int | None,
    threads: int | None, kv_dtype: str, offline: bool,
) -> None:  # fmt: skip
    """Talk to MODEL (the demo model if none is named)."""
    from octavo.errors import Unsupported
    from octavo.llm import LLM

    llm = LLM(
        model, memory=memory, context=context, threads=threads, kv_dtype=kv_dtype,
        offline=offline, loading=progress_bar,
    )  # fmt: skip
    if llm.task != "generate":
        raise Unsupported(
            f"{llm.name} generates no text; it makes vectors", f"octavo serve {model}"
        )
    if llm.template is None:
        raise Unsupported(
            f"{llm.name} has no chat template, so it cannot chat",
            f"octavo generate {model} -p TEXT",
        )
    conversation = Conversation(llm)
    if system:
        conversation.messages = [{"role": "system", "content": system}]
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    if prompt is not None:
        conversation.answer(prompt.strip())
        return
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    click.echo(f"{llm.name}: /help for commands, Ctrl-D to leave")
    while (text := _read()) is not None:
        if text.startswith("/"):
            if not conversation.command(text):
                return
        elif text:
            conversation.answer(text)
