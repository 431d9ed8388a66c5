"""Starts an engine's process, before anything is known of what it will load."""

from __future__ import annotations

import os
import socket
import subprocess
from dataclasses import dataclass

from octavo.errors import EngineFailed
from octavo.process import python_module

ENGINE = "octavo.client.engine_process"


@dataclass(frozen=True)
class Spawned:
    """A process that imports what it needs until it is told what to load, and the end of its socket
    that is ours. It ends when that is closed."""

    process: subprocess.Popen[bytes]
    sock: socket.socket


def spawn(name: str = "", module: str = ENGINE) -> Spawned:
    """Starts a process. name: what it is called in lists of processes. module: what it runs.

    Raises EngineFailed if the system has no process, memory or handle for it.
    """
    try:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    python_module(module, str(theirs.fileno()), str(os.getpid()), name),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C is the front's business, from the first import on
                )
            except BaseException:
                ours.close()
                raise
    except OSError as e:
        reason = f"the engine process cannot be started: {e.strerror}"
        raise EngineFailed(reason, code="engine_failed") from None
    return Spawned(process, ours)
