"""Reads lines from a terminal, with editing, a persistent history and completion."""

from __future__ import annotations

import contextlib
import glob
import os
from pathlib import Path

from octavo.cli.conversation import COMMANDS
from octavo.cli.screen import say

MOST = 1000  # lines of history


def history_file() -> Path:
    """`octavo/chat_history` where programs keep their state. Raises RuntimeError without a home."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    root = state if state.is_absolute() else Path.home() / ".local" / "state"
    return root / "octavo" / "chat_history"


class LineEditor:
    """Reads messages with readline, where Python has it; `history`: keep lines between runs."""

    def __init__(self, history: bool) -> None:
        self._file: Path | None = None
        try:
            import readline
        except ImportError:  # input() still reads
            return
        readline.set_completer_delims(" \t\n")
        readline.set_completer(complete)
        readline.parse_and_bind("tab: complete")
        readline.set_auto_history(False)
        if history:
            with contextlib.suppress(OSError, RuntimeError):  # a folder that cannot be written to
                self._file = self._open(history_file())

    def _open(self, file: Path) -> Path:
        """Loads the history and truncates its file, which is readable by this user only."""
        import readline

        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        readline.set_history_length(MOST)
        readline.read_history_file(file)
        readline.write_history_file(file)
        file.chmod(0o600)
        return file

    def _line(self, prompt: str) -> str:
        line = input(prompt)
        if line.strip():
            self._remember(line)
        return line

    def _remember(self, line: str) -> None:
        """Adds a line to the history and immediately to its file, so that nothing is lost."""
        with contextlib.suppress(ImportError, OSError):
            import readline

            readline.add_history(line)
            if self._file is not None:
                readline.append_history_file(1, self._file)

    def read(self) -> str | None:
        """A message: a line, or lines between triple quotes. None at the end of input.

        Ctrl-C raises KeyboardInterrupt.
        """
        try:
            line = self._line(">>> ")
            if not line.lstrip().startswith('"""'):
                return line.strip()
            lines = [line.lstrip()[3:]]
            while not lines[-1].rstrip().endswith('"""'):
                lines.append(self._line("... "))
            lines[-1] = lines[-1].rstrip()[:-3]
            return "\n".join(lines).strip()
        except EOFError:
            say()
            return None


def complete(text: str, state: int) -> str | None:
    """The `state`-th completion of the word at the cursor: a command, or the file of /save."""
    import readline

    line = readline.get_line_buffer()[: readline.get_endidx()]
    if line.startswith("/save "):
        found = sorted(f + "/" * os.path.isdir(f) for f in glob.glob(glob.escape(text) + "*"))
    else:
        found = [c + " " for c in COMMANDS if c.startswith(text)] if line.startswith("/") else []
        found = found if " " not in line else []
    return found[state] if state < len(found) else None
