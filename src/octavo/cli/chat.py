"""octavo chat."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.conversation import HELP, Conversation
from octavo.cli.line import LineEditor
from octavo.cli.options import draft_option, model_argument, sampled, sampling, sizing
from octavo.cli.screen import progress_bar, say

if TYPE_CHECKING:
    from octavo.engine.request import SamplingParams
    from octavo.llm import LLM


def reply(llm: LLM, conversation: Conversation, params: SamplingParams) -> Iterator[str]:
    """The reply to the last message as it comes. Raises RequestError."""
    if not conversation.has_media:
        yield from llm.stream(llm.encode_chat(conversation.messages), params)
        return
    for delta in llm.stream_chat(conversation.messages, params):
        if text := delta.reasoning + delta.text:
            yield text


class Session:
    """Messages typed and answered until the end of input."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm, self._params = llm, params
        self.conversation = Conversation(system)

    def answer(self) -> None:
        """Streams the answer to the last message; an interrupted one is kept as far as it came."""
        from octavo.errors import RequestError

        try:
            said = self._stream(self._llm.encode_chat(self.conversation.messages))
        except RequestError as e:
            self.conversation.undo()
            say(f"error: {e}", err=True)
            return
        self.conversation.answered(said)

    def _stream(self, prompt: list[int]) -> str:
        said, began, first, pieces = "", time.monotonic(), 0.0, 0
        try:
            for piece in reply(self._llm, self.conversation, self._params):
                first = first or time.monotonic()
                pieces += 1
                said += piece
                say(piece, end="")
        except KeyboardInterrupt:
            say(" (stopped)", end="")
        say()
        if sys.stdout.isatty() and pieces > 1:
            used = len(prompt) + pieces
            speed = (pieces - 1) / max(time.monotonic() - first, 1e-9)
            times = f"{first - began:.2f} s to first · {speed:.0f} tok/s"
            say(f"{used}/{self._llm.context} tokens · {times}", dim=True)
        return said

    def regenerate(self) -> None:
        """Answers the last message again: by chance another way, unless the temperature is 0."""
        if not self.conversation.forget_answer():
            say("there is no answer yet")
            return
        if self._params.seed is not None:  # the same seed would give the same answer
            self._params = sampled(self._params, {"seed": self._params.seed + 1})
        if self._params.temperature == 0:
            say("(temperature 0 always gives the same answer)", dim=True)
        self.answer()

    def loop(self, editor: LineEditor) -> None:
        """Until /exit or the end of input; Ctrl-C, whenever it comes, ends only an answer."""
        say(f"{self._llm.name}: /help for commands, Ctrl-D to leave")
        going = True
        while going:
            try:
                going = self._turn(editor)
            except KeyboardInterrupt:
                say("  (/exit or Ctrl-D leaves)")

    def _turn(self, editor: LineEditor) -> bool:
        """Reads a message or a command and obeys it. Whether there is a next."""
        text = editor.read()
        if text is None:
            return False
        if not text.startswith("/"):
            if text:
                self.conversation.ask(text)
                self.answer()
            return True
        word, _, rest = text.partition(" ")
        if word in ("/exit", "/quit", "/bye"):
            return False
        if word == "/regen":
            self.regenerate()
        elif word in ("/help", "/?"):
            say(HELP)
        else:
            say(self.conversation.command(word, rest.strip()))
        return True


@click.command()
@model_argument(default="smollm2")
@click.option(
    "-p", "--prompt", help="Answer this and end. [standard input when it is not a terminal]"
)
@click.option("--system", help="A system message.")
@click.option(
    "--image",
    "images",
    multiple=True,
    metavar="FILE",
    help="A picture that goes with the first message (repeatable).",
)
@click.option(
    "--video",
    "videos",
    multiple=True,
    metavar="FILE",
    help="A video that goes with it: GIF, WebP or PNG; with octavo[video] MP4, MOV, WebM or MKV.",
)
@click.option(
    "--history/--no-history", default=True, envvar="OCTAVO_HISTORY",
    help="Keep what is typed for the next time. [yes]",
)  # fmt: skip
@sampling
@draft_option
@sizing
def chat(
    model: str, prompt: str | None, system: str | None, images: tuple[str, ...],
    videos: tuple[str, ...], history: bool, memory: str | None, context: int | None,
    threads: int | None, kv_dtype: str, activations: str, mmproj: str, vision_dtype: str,
    offline: bool, draft: str | None, **given: Any,
) -> None:  # fmt: skip
    """Talk to MODEL (the demo model if none is named).

    Sampling options that are not given are the model's own.
    """
    from octavo.errors import Unsupported, UsageError
    from octavo.llm import LLM

    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    if prompt is not None and not prompt.strip():
        raise UsageError("there is nothing to answer: the prompt is empty", "--prompt Hello")
    llm = LLM(
        model, memory=memory, context=context, threads=threads, kv_dtype=kv_dtype,
        activations=activations, mmproj=mmproj, vision_dtype=vision_dtype, offline=offline,
        draft=draft, loading=progress_bar,
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
    if images and llm.model.images is None:
        raise UsageError(f"--image: {llm.name} takes text only", f"octavo show {model}")
    if videos and llm.model.videos is None:
        raise UsageError(f"--video: {llm.name} takes no videos", f"octavo show {model}")
    session = Session(llm, sampled(llm.defaults, given), system)
    for file in images:
        session.conversation.show(file)
    for file in videos:
        session.conversation.show(file, "video")
    if prompt is None:
        session.loop(LineEditor(history))
        return
    session.conversation.ask(prompt.strip())
    for piece in reply(llm, session.conversation, sampled(llm.defaults, given)):
        say(piece, end="")
    say()
