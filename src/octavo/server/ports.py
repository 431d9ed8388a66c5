"""Binding the port before anything is loaded, and saying who has it when somebody does."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from octavo.errors import PortTaken, UsageError

# Connections inherit them: a client whose machine is gone is noticed after two minutes.
KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)


def bind(host: str, port: int) -> socket.socket:
    """A bound, listening socket. PortTaken, or UsageError for an address that is not ours."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, OverflowError):
        raise UsageError(f"--host {host!r} --port {port} is not an address") from None
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for level, option, value in KEEP_ALIVE:
        sock.setsockopt(level, option, value)
    try:
        sock.bind(address)
        sock.listen(2048)
    except OSError as e:
        sock.close()
        if e.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"port {port} is in use{_holder(port)}", f"--port {_free_port(host, port)}"
            ) from None
        if e.errno == errno.EACCES:
            raise UsageError(
                f"port {port} needs more rights than this user has", "--port 8000"
            ) from None
        raise UsageError(f"cannot listen on {host}:{port}: {e.strerror}") from None
    sock.setblocking(False)
    return sock


def _free_port(host: str, port: int) -> int:
    for candidate in range(port + 1, min(port + 50, 65536)):
        with socket.socket() as probe:
            try:
                probe.bind((host, candidate))
                return candidate
            except OSError:
                continue
    return 0


def _holder(port: int) -> str:
    """` by NAME (pid N, COMMAND)` of the process that listens on the port, where /proc tells."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
        except OSError:
            continue
        inodes |= {r[9] for r in rows if r[3] == "0A" and int(r[1].rsplit(":", 1)[1], 16) == port}
    targets = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(fd) in targets for fd in (process / "fd").iterdir()):
                name = (process / "comm").read_text().strip()
                words = (process / "cmdline").read_bytes().split(b"\0")
                command = b" ".join(w.rsplit(b"/", 1)[-1] for w in words if w).decode(
                    errors="replace"
                )
                return f" by {name} (pid {process.name}, {command[:60]})"
        except OSError:
            continue
    return ""
