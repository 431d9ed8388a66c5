"""Looks up addresses of hosts, with a limit of time, which the system's resolver has not."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future


def resolve(host: str) -> Sequence[str]:
    """Every address of a host. Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class Lookups:
    """Look-ups that are under way, one a host at most: nothing ends one that hangs, so that there
    are never more threads of them than hosts."""

    def __init__(self, resolve: Callable[[str], Sequence[str]] = resolve) -> None:
        self._resolve, self._lock = resolve, threading.Lock()
        self._pending: dict[str, Future[Sequence[str]]] = {}

    def find(self, host: str, seconds: float) -> Sequence[str]:
        """Every address of a host. Raises OSError, and TimeoutError after `seconds`."""
        with self._lock:
            found = self._pending.get(host)
            if found is None:
                found = self._pending[host] = Future()
                # A daemon, as an executor's threads are not: the process may end without it.
                threading.Thread(
                    target=self._look_up, args=(host, found), name="octavo-lookup", daemon=True
                ).start()
        return found.result(seconds)

    def _look_up(self, host: str, found: Future[Sequence[str]]) -> None:
        try:
            addresses = self._resolve(host)
        except Exception as e:
            self._end(host)
            found.set_exception(e)
        else:
            self._end(host)
            found.set_result(addresses)

    def _end(self, host: str) -> None:
        """Who asks from now on gets a new look-up."""
        with self._lock:
            del self._pending[host]
