"""A server that answers at an address, as `octavo doctor` and `octavo top` ask it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from octavo.cli.http import HttpRefusal, NoAnswer, send
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

    def post(self, path: str, body: Any, seconds: float) -> bytes:
        """What is answered within so many seconds."""
        return self._ask(path, json.dumps(body).encode(), seconds)

    def _ask(self, path: str, data: bytes | None, seconds: float) -> bytes:
        try:
            return send(self.url + path, self._key, data, seconds)
        except HttpRefusal as e:
            if e.status in (401, 403):
                raise UsageError(f"{self.url}{path} needs a key", "--api-key KEY") from None
            if data is not None:
                why = e.message or f"answer {e.status}"
                raise UsageError(f"{self.url}{path}: {why}") from None
            raise UsageError(f"{self.url}{path} answers {e.status}", "octavo ps") from None
        except NoAnswer as e:
            raise UsageError(f"{self.url} does not answer: {e}", "octavo ps") from None

    def json(self, path: str) -> Any:
        return self._read(path, json.loads)

    def metrics(self) -> Series:
        from octavo.server.window import read

        return self._read("/metrics", read)

    def _read(self, path: str, reader: Callable[[str], T]) -> T:
        text = self.get(path)
        try:
            return reader(text)
        except ValueError:
            raise UsageError(f"{self.url}{path} is none of Octavo", "octavo ps") from None


def the_server() -> str:
    """The address of the one server that runs here. Raises UsageError for none, or several."""
    from octavo.cli.ps import running

    found = [server.url for server in running() if server.url]
    if len(found) != 1:
        word = "no server runs" if not found else f"{len(found)} servers run"
        raise UsageError(f"{word} on this machine; name one", *(found or ["octavo serve"]))
    return found[0]


key_option = click.option(
    "--api-key", "key", envvar="OCTAVO_ADMIN_KEY", help="Key of an admin, if the server has keys."
)
