"""A PostgreSQL server of Debian's (`apt install postgresql`), which keeps nothing."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.api.server import free_port

PROGRAMS = Path("/usr/lib/postgresql")


class Postgres:
    """It keeps what it has while it is stopped. url: as its only user, who may do everything."""

    def __init__(self, folder: Path) -> None:
        found = sorted(PROGRAMS.glob("*/bin"))
        assert found, "these tests need PostgreSQL: apt install postgresql"
        self._programs, self._folder, port = found[-1], folder, free_port()
        self._user = "postgres" if os.getuid() == 0 else None  # it does not run as root
        if self._user is not None:
            os.chown(folder, pwd.getpwnam(self._user).pw_uid, -1)
        self.url = f"postgresql://octavo@127.0.0.1:{port}/postgres"
        self._options = (
            f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder}"
            " -c fsync=off"
        )
        self._run("initdb", "-A", "trust", "-U", "octavo", "--no-sync")

    def _run(self, program: str, *arguments: str) -> None:
        command = (f"{self._programs}/{program}", "-D", f"{self._folder}/data", *arguments)
        subprocess.run(
            command, check=True, user=self._user, cwd=self._folder, stdout=subprocess.DEVNULL
        )

    def start(self) -> None:
        self._run("pg_ctl", "-w", "-l", f"{self._folder}/log", "-o", self._options, "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-w", "-m", "immediate", "stop")


@contextmanager
def running() -> Iterator[Postgres]:
    """One that is ready."""
    folder = Path(tempfile.mkdtemp(prefix="octavo-postgres-"))
    try:
        one = Postgres(folder)
        one.start()
        try:
            yield one
        finally:
            one.stop()
    finally:
        shutil.rmtree(folder)


@contextmanager
def server() -> Iterator[str]:
    """The URL of one, which is ready."""
    with running() as one:
        yield one.url
