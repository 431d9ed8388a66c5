"""octavo gateway."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from octavo.cli.access import keyring_of, url_of
from octavo.cli.options import POLICIES, Number, count
from octavo.cli.screen import say

if TYPE_CHECKING:
    from octavo.gateway.upstreams import Upstreams
    from octavo.server.exchange import Exchange


@click.command()
@click.option(
    "--upstream", "upstreams", multiple=True, metavar="[POOL=]URL",
    help="Server that answers: http://HOST:PORT (repeatable).",
)  # fmt: skip
@click.option(
    "--fallback", "fallbacks", multiple=True, metavar="URL",
    help="Server that answers when none of the others can (repeatable).",
)  # fmt: skip
@click.option(
    "--upstream-file", "file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with an upstream a line, looked at every second.",
)  # fmt: skip
@click.option(
    "--upstream-dns", "names", multiple=True, metavar="URL",
    help="Every address of the URL's name is an upstream; asked for every 5 seconds (repeatable).",
)  # fmt: skip
@click.option(
    "--upstream-key", "key", envvar="OCTAVO_UPSTREAM_KEY",
    help="Key that upstreams want to see. [the client's, if the gateway needs none itself]",
)  # fmt: skip
@click.option(
    "--routing", type=click.Choice(POLICIES), default="cost", show_default=True,
    help="How upstreams are chosen.",
)  # fmt: skip
@click.option(
    "--max-inflight", "places", type=count(1, 1 << 16), default=256, show_default=True, metavar="N",
    help="Requests at an upstream at once; others wait at the gateway.",
)  # fmt: skip
@click.option(
    "--max-queue", type=count(0, 1 << 20), default=1024, show_default=True, metavar="N",
    help="Requests that wait before new ones get 503.",
)  # fmt: skip
@click.option(
    "--queue-timeout", type=Number(min=0), default=30, show_default=True, metavar="SECONDS",
    help="Seconds that a request waits for an upstream.",
)  # fmt: skip
@click.option(
    "--connect-timeout", "connect", type=Number(min=0.01), default=2, show_default=True,
    metavar="SECONDS", help="Seconds to reach an upstream.",
)  # fmt: skip
@click.option(
    "--first-token-timeout", "first", type=Number(min=0.01), default=120, show_default=True,
    metavar="SECONDS", help="Seconds until a stream begins.",
)  # fmt: skip
@click.option(
    "--idle-timeout", "idle", type=Number(min=0.01), default=10, show_default=True,
    metavar="SECONDS",
    help="Seconds between parts of a stream; three times that of servers other than Octavo.",
)  # fmt: skip
@click.option(
    "--total-timeout", "total", type=Number(min=0.01), default=3600, show_default=True,
    metavar="SECONDS", help="Seconds for an answer that is not streamed.",
)  # fmt: skip
@click.option(
    "--probe-interval", "interval", type=Number(min=0.05), default=2, show_default=True,
    metavar="SECONDS", help="Seconds between probes of an upstream.",
)  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True, envvar="OCTAVO_HOST",
              help="Address to listen on.")  # fmt: skip
@click.option(
    "--port", type=count(0, 65535), default=8080, show_default=True, metavar="N",
    envvar="OCTAVO_PORT", help="Port to listen on; 0 for any that is free.",
)  # fmt: skip
@click.option("--api-key", "api_keys", multiple=True, envvar="OCTAVO_API_KEY",
              help="Require this key (repeatable).")  # fmt: skip
@click.option("--admin-key", envvar="OCTAVO_ADMIN_KEY",
              help="Require this key to see and change upstreams.")  # fmt: skip
@click.option(
    "--keys", "key_file", type=click.Path(dir_okay=False, path_type=Path), envvar="OCTAVO_KEYS",
    help="Require a key of this file, which octavo key writes.",
)  # fmt: skip
@click.option("--limits-url", metavar="URL", envvar="OCTAVO_LIMITS_URL",
              help="Valkey in which several gateways count limits together.")  # fmt: skip
@click.option("--allowed-host", "hosts", multiple=True, metavar="NAME",
              help="Name that clients may call this gateway by (repeatable).")  # fmt: skip
@click.option("--cors-origin", "origins", multiple=True, metavar="ORIGIN",
              help="Web pages that may call this gateway (repeatable).")  # fmt: skip
@click.option(
    "--database", metavar="URL", envvar="OCTAVO_DATABASE",
    help="SQLite file or postgresql:// URL that keeps releases and experiments; gateways with the "
    "same one agree. [in memory]",
)  # fmt: skip
@click.option(
    "--drain-timeout", type=count(0, 86_400), default=30, show_default=True, metavar="SECONDS",
    help="Seconds given to running requests at the end.",
)  # fmt: skip
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]),
              default="info", show_default=True, envvar="OCTAVO_LOG_LEVEL",
              help="Least of what is logged.")  # fmt: skip
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text",
              show_default=True, envvar="OCTAVO_LOG_FORMAT",
              help="Lines to read, or an object a line.")  # fmt: skip
def gateway(
    upstreams: tuple[str, ...], fallbacks: tuple[str, ...], file: Path | None,
    names: tuple[str, ...], key: str | None, routing: str, places: int, max_queue: int,
    queue_timeout: float, connect: float, first: float, idle: float, total: float,
    interval: float, host: str, port: int, api_keys: tuple[str, ...], admin_key: str | None,
    key_file: Path | None, limits_url: str | None, hosts: tuple[str, ...],
    origins: tuple[str, ...], database: str | None, drain_timeout: int, log_level: str,
    log_format: str,
) -> None:  # fmt: skip
    """Answer for any number of servers at one address: Octavo, vLLM, SGLang, llama.cpp, any that
    speaks OpenAI's API."""

    from octavo.errors import UsageError
    from octavo.gateway.extra import check_installed

    check_installed()
    if not (upstreams or fallbacks or file or names or admin_key):
        raise UsageError("a gateway needs a server behind it", "--upstream http://127.0.0.1:8000")

    from octavo.gateway.upstream import DEFAULT, FALLBACK, parse_place

    named = [parse_place(text, DEFAULT, key) for text in upstreams]
    named += [parse_place(text, FALLBACK, key) for text in fallbacks]

    import uvloop

    from octavo.gateway.admission import QueueLimits
    from octavo.gateway.health import HealthCheck
    from octavo.gateway.run import GatewayOptions, serve, sources
    from octavo.gateway.transport import Timeouts
    from octavo.server.guard import Access
    from octavo.server.logs import logging_to
    from octavo.server.ports import bind

    access = Access(host, api_keys, admin_key, hosts, origins, keyring_of(key_file, limits_url))
    options = GatewayOptions(
        access, named, file, names, key, routing, places, Timeouts(connect, first, idle, total),
        QueueLimits(max_queue, queue_timeout), HealthCheck(interval), database, drain_timeout,
    )  # fmt: skip
    for find, _ in sources(options):
        find()  # what is wrong with them is said before anything else
    sock = bind(host, port)
    screen = _Screen(url_of(host, sock.getsockname()[1]))
    with logging_to(sys.stdout, log_level, log_format):
        uvloop.run(serve(options, sock, ready=screen.ready, ended=screen.count))
    screen.goodbye()


class _Screen:
    """What the terminal shows of a gateway."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.requests = self.errors = 0

    def ready(self, upstreams: Upstreams) -> None:
        from octavo import __version__

        lines = ["", f"Octavo {__version__}   gateway"]
        for up in upstreams:
            what = ", ".join(up.models) if up.state == "up" else up.reason or "has not answered yet"
            lines.append(f"  {up.state:9} {up.place.url}   {what}")
        lines += [f"  API       {self._url}/v1", f"  metrics   {self._url}/metrics"]
        if not any(up.state == "up" for up in upstreams):
            lines.append("  no upstream answers yet; requests wait for one (--queue-timeout)")
        say("\n".join([*lines, ""]))

    def count(self, one: Exchange) -> None:
        if one.usage is not None:
            self.requests += 1
            self.errors += one.status >= 500

    def goodbye(self) -> None:
        say(f"passed on {self.requests} requests, {self.errors} errors; bye")
