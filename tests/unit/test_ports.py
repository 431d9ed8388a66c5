"""Binding: what is taken is told before anything is loaded, with who has it."""

from __future__ import annotations

import os
import socket

import pytest

from octavo.errors import PortTaken, UsageError
from octavo.server.ports import bind, listening_sockets


def test_a_free_port() -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert port > 0 and not sock.getblocking()
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        inode = os.readlink(f"/proc/self/fd/{sock.fileno()}")
        assert listening_sockets()[inode] == ("127.0.0.1", port)
    assert inode not in listening_sockets()


def test_a_taken_port() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(PortTaken) as refused:
            bind("127.0.0.1", port)
        assert f"port {port} is in use" in str(refused.value)
        assert f"(pid {os.getpid()}, " in str(refused.value)
        (suggestion,) = refused.value.suggestions
        other = int(suggestion.removeprefix("--port "))
        assert other > port
        bind("127.0.0.1", other).close()


@pytest.mark.parametrize("host", ["no.such.name.invalid", "256.1.1.1", "192.0.2.1"])
def test_addresses_that_are_not_ours(host: str) -> None:
    with pytest.raises(UsageError, match=host):
        bind(host, 0)


def test_any_address_is_shown_as_the_loopback() -> None:
    with bind("0.0.0.0", 0) as sock:
        found = listening_sockets()[os.readlink(f"/proc/self/fd/{sock.fileno()}")]
        assert found == ("127.0.0.1", sock.getsockname()[1])
