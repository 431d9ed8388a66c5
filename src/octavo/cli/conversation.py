"""The messages of a chat, and the commands that change them."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from octavo.errors import UsageError

HELP = '''/help            this
/system TEXT     set the system message; the conversation starts again
/system          show the system message
/clear           start again, with the same system message
/undo            take back the last message and its answer
/regen           answer the last message again
/image FILE      show a picture with the next message
/video FILE      show a video with it
/save FILE       write the conversation as JSON
/exit            leave (or Ctrl-D)
"""              begins and ends a message of several lines
Ctrl-C           stops the answer, not the program'''
COMMANDS = ("/help", "/system", "/clear", "/undo", "/regen", "/image", "/video", "/save", "/exit")


class Conversation:
    """Messages so far: perhaps a system message, then questions and answers in turn."""

    def __init__(self, system: str | None = None) -> None:
        self.messages = _opening(system)
        self._shown: list[dict[str, Any]] = []  # pictures and videos for the next message

    @property
    def system(self) -> str | None:
        first = self.messages[:1]
        return first[0]["content"] if first and first[0]["role"] == "system" else None

    @property
    def has_media(self) -> bool:
        return any(isinstance(m["content"], list) for m in self.messages)

    def show(self, file: str, kind: str = "image") -> str:
        """Adds a picture, or a "video", to the next message. Raises UsageError for a file that
        cannot be read."""
        self._shown.append(medium(file, kind))
        return f"{Path(file).name} goes with the next message"

    def ask(self, text: str) -> None:
        """A message, with what was shown for it."""
        asked = [*self._shown, {"type": "text", "text": text}] if self._shown else text
        self.messages.append({"role": "user", "content": asked})
        self._shown = []

    def answered(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def forget_answer(self) -> bool:
        """Takes back the last answer, whose question stays. False if there is none."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return False
        self.messages.pop()
        return True

    def undo(self) -> bool:
        """Takes back the last question, with its answer. False if there is none."""
        self.forget_answer()
        if not self.messages or self.messages[-1]["role"] != "user":
            return False
        self.messages.pop()
        return True

    def command(self, word: str, rest: str) -> str:
        """Obeys a /command and says what it did."""
        if word == "/system":
            return self._set_system(rest)
        if word in ("/clear", "/reset"):
            gone = self._restart(self.system)
            kept = "; the system message stays" if self.system else ""
            return f"the conversation starts again ({gone} messages dropped{kept})"
        if word == "/undo":
            return "took back the last message" if self.undo() else "there is nothing to take back"
        if word in ("/image", "/video"):
            return self._show(rest, word[1:])
        if word == "/save":
            return self._save(rest)
        close = difflib.get_close_matches(word, COMMANDS, 1)
        meant = f"; did you mean {close[0]}?" if close else "; /help lists them"
        return f"no command {word}{meant}"

    def _restart(self, system: str | None) -> int:
        """Keeps nothing but the system message, and returns how many messages went."""
        gone = len(self.messages) - (self.system is not None)
        self.messages = _opening(system)
        return gone

    def _set_system(self, text: str) -> str:
        if not text:
            return f"system message: {self.system}" if self.system else "there is no system message"
        gone = self._restart(text)
        return f"system message set; the conversation starts again ({gone} messages dropped)"

    def _show(self, file: str, kind: str) -> str:
        if not file:
            example = "drawing.png" if kind == "image" else "clip.mp4"
            return f"name a file: /{kind} {example}"
        try:
            return self.show(file, kind)
        except UsageError as e:
            return f"error: {e}"

    def _save(self, file: str) -> str:
        if not file:
            return "name a file: /save conversation.json"
        path = Path(file)
        try:
            path = path.expanduser()
            text = json.dumps(self.messages, ensure_ascii=False, indent=2, default=str)
            path.write_text(text + "\n")
        except (OSError, RuntimeError, ValueError) as e:
            return f"error: cannot write {file}: {getattr(e, 'strerror', None) or e}"
        return f"saved {len(self.messages)} messages to {path}"


def medium(file: str, kind: str) -> dict[str, Any]:
    """A file as a part of a message. Raises UsageError unless it can be read."""
    try:
        path = Path(file).expanduser()
        with path.open("rb"):
            return {"type": kind, kind: path}
    except (OSError, RuntimeError, ValueError) as e:
        raise UsageError(f"cannot read {file}: {getattr(e, 'strerror', None) or e}") from None


def _opening(system: str | None) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}] if system else []
