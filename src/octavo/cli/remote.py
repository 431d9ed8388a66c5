"""A server that answers at an address, as commands ask it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from octavo.cli.http import HttpRefusal, NoAnswer, send
from octavo.cli.options import F, together
from octavo.errors import OctavoError, UsageError

if TYPE_CHECKING:
    from octavo.server.window import Series

T = TypeVar("T")
NO_ROUTE = "there is no such route"
OF_GATEWAYS = ("/v1/releases", "/v1/experiments", "/v1/gateway")  # routes, which servers lack
# Routes that gateways lack, and what these have instead.
OF_ENGINES = {
    "/v1/replicas": "/v1/upstreams",
    "/v1/routes": """/v1/route/explain -d '{"model": "MODEL", "prompt": "TEXT"}'""",
}
READ, WAIT = 5.0, 30.0  # seconds for an answer that only says something, and for any


class ServerRefused(OctavoError):
    """The server said no, and why."""


class Remote:
    """A server or a gateway. key: of an admin, where it has keys. Its methods raise UsageError for
    what is none, and ServerRefused."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
        self._key = key

    def ask(self, path: str, body: Any = None, seconds: float | None = WAIT) -> bytes:
        """What is answered, within so many seconds if that is a number. body: is posted, if it is
        not None."""
        import msgspec

        data = None if body is None else msgspec.json.encode(body)
        try:
            return send(self.url + path, self._key, data, seconds)
        except HttpRefusal as e:
            if e.status in (401, 403):
                sent = ", and the key that was sent is none there" if self._key else ""
                raise UsageError(
                    f"{self.url}{path} needs an admin's key{sent}", "--admin-key KEY"
                ) from None
            if e.message == NO_ROUTE:
                raise _of_another_kind(self.url, path, self._key) from None
            if e.message is not None:
                raise ServerRefused(e.message) from None
            raise UsageError(f"{self.url}{path}: it answers {e.status}", "octavo ps") from None
        except NoAnswer as e:
            raise UsageError(f"{self.url} does not answer: {e}", "octavo ps") from None

    def json(self, path: str) -> Any:
        return self._read(path, self.ask(path, None, READ), json.loads)

    def object(self, path: str, body: Any = None, seconds: float = WAIT) -> dict[str, Any]:
        """A JSON object."""
        return self._read(path, self.ask(path, body, seconds), lambda text: {**json.loads(text)})

    def listed(self, path: str, body: Any = None) -> list[Any]:
        """The `data` of a list, or of what a change lists when it is done."""
        answer = self.ask(path, body, READ if body is None else None)
        return self._read(path, answer, lambda text: list(json.loads(text)["data"]))

    def metrics(self) -> Series:
        from octavo.server.window import read

        return self._read("/metrics", self.ask("/metrics", None, READ), lambda t: read(t.decode()))

    def _read(self, path: str, answer: bytes, reader: Callable[[bytes], T]) -> T:
        try:
            return reader(answer)
        except (ValueError, LookupError, TypeError):
            raise UsageError(f"{self.url}{path} is none of Octavo", "octavo ps") from None


def _of_another_kind(url: str, path: str, key: str | None) -> OctavoError:
    """What to say of a server or a gateway that does not have a route."""
    route = path.partition("?")[0]
    if route.startswith(OF_GATEWAYS):
        return UsageError(
            f"{url} is no gateway: it has no {route}", f"octavo gateway --upstream {url}"
        )
    for own, instead in OF_ENGINES.items():
        if route.startswith(own):
            sent = ' -H "Authorization: Bearer $OCTAVO_ADMIN_KEY"' if key else ""
            return UsageError(
                f"{url} has no {route}, which octavo serve has: a gateway is asked in another way",
                f"curl{sent} {url}{instead}",
            )
    return ServerRefused(f"{url}{route}: {NO_ROUTE}")


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

# Of commands that are about a gateway.
gateway_options = together(
    server_option(
        "Address of the gateway.", default="http://127.0.0.1:8080", show_default=True,
        envvar="OCTAVO_SERVER",
    ),
    admin_key_option,
)  # fmt: skip
