"""Binds the port before anything is loaded, and names the process that has a taken one."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
from pathlib import Path

from octavo.errors import PortTaken, UsageError

# Connections inherit them: a client whose machine is unreachable is noticed after two minutes.
KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)


def bind(host: str, port: int) -> socket.socket:
    """A bound, listening socket. Raises PortTaken, or UsageError for an unusable address."""
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


def listening_sockets() -> dict[str, tuple[str, int]]:
    """Host and port of every TCP socket that listens here, by its name in /proc/PID/fd."""
    found = {}
    for table, loopback in (("/proc/net/tcp", "127.0.0.1"), ("/proc/net/tcp6", "[::1]")):
        try:
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
        except OSError:
            continue
        for address, state, inode in ((r[1], r[3], r[9]) for r in rows):
            host, port = address.rsplit(":", 1)
            if state == "0A":
                found[f"socket:[{inode}]"] = (_address(host, loopback), int(port, 16))
    return found


def _address(raw: str, loopback: str) -> str:
    """Parses an address of /proc, in words of native byte order. 0.0.0.0 becomes `loopback`."""
    words = [int(raw[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(raw), 8)]
    address = ipaddress.ip_address(b"".join(words))
    if address.is_unspecified:
        return loopback
    return f"[{address}]" if address.version == 6 else str(address)


def _holder(port: int) -> str:
    """` by NAME (pid N, COMMAND)` of the process that listens on the port, where /proc tells."""
    targets = {name for name, (_, listens) in listening_sockets().items() if listens == port}
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
