"""What octavo doctor and octavo top say of something else at the address."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from octavo.cli.remote import Remote, ServerRefused
from octavo.errors import UsageError

REFUSED = b"HTTP/1.0 403 Forbidden\r\n\r\n"


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """The address of a server that answers once, so."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def said_of(answer: bytes, key: str | None = None) -> str:
    """What is said of a server that answers so."""
    with answering(answer) as url, pytest.raises(UsageError) as e:
        Remote(url, key).metrics()
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


NO_ROUTE = b'HTTP/1.0 404 Not Found\r\n\r\n{"error":{"message":"there is no such route"}}'


@pytest.mark.parametrize(
    ("path", "key", "says", "hint"),
    [
        ("/v1/releases?model=m", "k", "is no gateway: it has no /v1/releases",
         "octavo gateway --upstream URL"),
        ("/v1/replicas", None, "has no /v1/replicas, which octavo serve has", "curl URL/v1/upstreams"),
        ("/v1/routes", "k", "has no /v1/routes, which octavo serve has",
         'curl -H "Authorization: Bearer $OCTAVO_ADMIN_KEY" URL/v1/route/explain '
         """-d '{"model": "MODEL", "prompt": "TEXT"}'"""),
    ],
)  # fmt: skip
def test_the_wrong_kind_of_server(path: str, key: str | None, says: str, hint: str) -> None:
    with answering(NO_ROUTE) as url, pytest.raises(UsageError, match=f"^{url} {says}") as e:
        Remote(url, key).json(path)
    assert e.value.suggestions == (hint.replace("URL", url),)


def test_any_other_route() -> None:
    with answering(NO_ROUTE) as url, pytest.raises(ServerRefused, match="/v1/profile: there is no"):
        Remote(url, None).json("/v1/profile")


def test_a_key_that_is_wrong_is_not_missing() -> None:
    said = said_of(REFUSED, "bad")
    assert said.endswith("/metrics needs an admin's key, and the key that was sent is none there")


def test_who_stops_waiting_for_an_update_is_told_that_it_goes_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        words = ["release", "update", "m", "--to", "x", "--server"]
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        command = [sys.executable, "-P", "-m", "octavo.cli.main", *words, url]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(1 << 16).startswith(b"POST /v1/releases/update")
            process.send_signal(signal.SIGINT)
            said, error = process.communicate(timeout=30)
    assert (said, error) == (b"", b"the gateway goes on; octavo release status m\n")
    assert process.returncode == 130
