"""What octavo doctor and octavo top say of something else at the address."""

from __future__ import annotations

import socket
import threading

import pytest

from octavo.cli.remote import Remote
from octavo.errors import UsageError

REFUSED = b"HTTP/1.0 403 Forbidden\r\n\r\n"


def said_of(answer: bytes, key: str | None = None) -> str:
    """What is said of a server that answers so."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(UsageError) as e:
            Remote(f"127.0.0.1:{listener.getsockname()[1]}", key).metrics()
        thread.join()
    return str(e.value)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not answer: SSH-2.0-OpenSSH_9.2"),
        (b"HTTP/1.0 200 OK\r\n\r\n<html>\n", "/metrics is none of Octavo"),
        (b'HTTP/1.0 200 OK\r\n\r\n{"status":"ready"}\n', "/metrics is none of Octavo"),
        (REFUSED, "/metrics needs an admin's key"),
        (b"", "does not answer: Remote end closed connection without response"),
    ],
)
def test_others(answer: bytes, said: str) -> None:
    assert said in said_of(answer)


def test_a_key_that_is_wrong_is_not_missing() -> None:
    said = said_of(REFUSED, "bad")
    assert said.endswith("/metrics needs an admin's key, and the key that was sent is none there")
