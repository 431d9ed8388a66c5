"""A server that answers at an address, as commands ask it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from octavo.cli.http import HttpRefusal, NoAnswer, send
from octavo.cli.options import F, together
from octavo.errors import UsageError

if TYPE_CHECKING:
    from octavo.server.window import Series

T = TypeVar("T")
SECONDS = 5.0  # for an answer


class Remote:
    """key: of an admin, where the server has keys. Raises UsageError for what does not answer."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
        self._key = key

    def get(self, path: str) -> str:
        return self._ask(path, None, SECONDS).decode()

    def post(self, path: str, body: Any, seconds: float | None) -> bytes:
        """What is answered, within so many seconds if that is a number."""
        return self._ask(path, json.dumps(body).encode(), seconds)

    def _ask(self, path: str, data: bytes | None, seconds: float | None) -> bytes:
        try:
            return send(self.url + path, self._key, data, seconds)
        except HttpRefusal as e:
            if e.status in (401, 403):
                raise UsageError(
                    f"{self.url}{path} needs an admin's key", "--admin-key KEY"
                ) from None
            why, hints = e.message, list[str]()
            if why is None:
                why, hints = f"it answers {e.status}", ["octavo ps"]
            raise UsageError(f"{self.url}{path}: {why}", *hints) from None
        except NoAnswer as e:
            raise UsageError(f"{self.url} does not answer: {e}", "octavo ps") from None

    def json(self, path: str) -> Any:
        return self._read(path, self.get(path), json.loads)

    def listed(self, path: str, body: Any = None) -> list[Any]:
        """The `data` of a list, or of what a change lists when it is done."""
        answer = self.get(path) if body is None else self.post(path, body, None).decode()
        found: list[Any] = self._read(path, answer, lambda text: json.loads(text)["data"])
        return found

    def metrics(self) -> Series:
        from octavo.server.window import read

        return self._read("/metrics", self.get("/metrics"), read)

    def _read(self, path: str, answer: str, reader: Callable[[str], T]) -> T:
        try:
            return reader(answer)
        except (ValueError, LookupError, TypeError):
            raise UsageError(f"{self.url}{path} is none of Octavo", "octavo ps") from None


def find_server(server: str | None, key: str | None) -> Remote:
    """The server at an address, else the one that runs here. Raises UsageError for none, or
    several."""
    from octavo.cli.ps import running

    if server is not None:
        return Remote(server, key)
    found = [each.url for each in running() if each.url]
    if len(found) != 1:
        word = "no server runs" if not found else f"{len(found)} servers run"
        raise UsageError(
            f"{word} on this machine; name one",
            *([f"--server {url}" for url in found] or ["octavo serve"]),
        )
    return Remote(found[0], key)


admin_key_option = click.option(
    "--admin-key", metavar="KEY", envvar="OCTAVO_ADMIN_KEY",
    help="Key of an admin, if the server has keys.",
)  # fmt: skip


def server_option(text: str, **more: Any) -> Callable[[F], F]:
    """--server: the address of one that runs."""
    return click.option("--server", metavar="URL", help=text, **more)


# Of commands that are about a server always.
server_options = together(
    server_option("Address of the server. [the one on this machine]", envvar="OCTAVO_SERVER"),
    admin_key_option,
)
