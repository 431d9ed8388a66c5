"""A command at a terminal of its own, typed at when it prompts."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

OCTAVO = [sys.executable, "-m", "octavo.cli.main"]
_STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def plain(text: str) -> str:
    """Without colours and movements of the cursor."""
    return _STYLE.sub("", text)


class Terminal:
    """`octavo ARGUMENTS` at a terminal of `columns`; what it writes is in `seen`."""

    def __init__(
        self, *arguments: str, columns: int = 60, cwd: Path | None = None, **env: str
    ) -> None:
        self._fd, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

        def controlling() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        # a size in the environment, which readline sets where it is loaded, counts more than the terminal's
        around = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [*OCTAVO, *arguments], stdin=slave, stdout=slave, stderr=slave, cwd=cwd,
            env=around | {"TERM": "xterm"} | env, preexec_fn=controlling,
        )  # fmt: skip
        os.close(slave)
        self.seen, self._told = "", 0

    def wait_for(self, text: str, seconds: float = 90) -> str:
        """What came up to and with `text`, since the last time."""
        deadline = time.monotonic() + seconds
        while text not in self.seen[self._told :]:
            assert time.monotonic() < deadline and self._read(), self.seen[self._told :]
        start, self._told = self._told, self.seen.index(text, self._told) + len(text)
        return self.seen[start : self._told]

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def interrupt(self, seconds: float = 20) -> str:
        """Presses Ctrl-C at a prompt and returns what is printed up to the next one.

        Presses it again if nothing happens: a signal that arrives after CPython's readline has printed
        its prompt and before it waits (13 of 241,707 tries beside other load) is only seen with the next.
        """
        for _ in range(3):
            self.type("\x03")
            deadline = time.monotonic() + seconds
            while "\n>>> " not in self.seen[self._told :] and time.monotonic() < deadline:
                assert self._read(), self.seen[self._told :]
            if "\n>>> " in self.seen[self._told :]:
                break
        return self.wait_for("\n>>> ", 0)

    def tell(self, line: str, prompt: str = ">>> ") -> str:
        """Types a line, and returns what is printed up to the next prompt."""
        self.type(line + "\n")
        return self.wait_for("\n" + prompt)

    def end(self, seconds: float = 60) -> int:
        """Reads to the end and returns the exit code."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._read():
            pass
        os.close(self._fd)
        return self.process.wait(10)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._fd], [], [], 0.5)
        if not ready:
            return self.process.poll() is None
        try:
            data = os.read(self._fd, 65536)
        except OSError:
            return False
        self.seen += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)
