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


@contextmanager
def server() -> Iterator[str]:
    """The URL of one, which is ready."""
    found = sorted(PROGRAMS.glob("*/bin"))
    assert found, "these tests need PostgreSQL: apt install postgresql"
    programs, port = found[-1], free_port()
    folder = Path(tempfile.mkdtemp(prefix="octavo-postgres-"))
    user = "postgres" if os.getuid() == 0 else None  # it does not run as root
    if user is not None:
        os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
    data = str(folder / "data")

    def run(*command: str) -> None:
        subprocess.run(command, check=True, user=user, cwd=folder, stdout=subprocess.DEVNULL)

    options = (
        f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off"
    )
    try:
        run(f"{programs}/initdb", "-D", data, "-A", "trust", "-U", "octavo", "--no-sync")
        run(f"{programs}/pg_ctl", "-D", data, "-w", "-l", f"{folder}/log", "-o", options, "start")
        yield f"postgresql://octavo@127.0.0.1:{port}/postgres"
    finally:
        run(f"{programs}/pg_ctl", "-D", data, "-w", "-m", "immediate", "stop")
        shutil.rmtree(folder)
