"""octavo gateway."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.access import url_of
from octavo.cli.numbers import Number, count
from octavo.cli.options import POLICIES
from octavo.cli.remote import Remote, server_option
from octavo.cli.screen import say, say_json
from octavo.cli.watching import Watching, watching_options
from octavo.process import unmap_freed_blocks

if TYPE_CHECKING:
    from octavo.gateway.upstreams import Upstreams
    from octavo.server.exchange import Exchange


class Hedge(Number):
    """Seconds, or `p95`."""

    def __init__(self) -> None:
        super().__init__(0.01, 86_400)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == "p95" else super().convert(value, param, ctx)


@click.command()
@click.option(
    "--config", "config_file", metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="All of this in YAML, and pools and models; read again on SIGHUP. See docs/gateway.md.",
)  # fmt: skip
@click.option("--check", is_flag=True, help="Only say what the configuration changes.")
@server_option("With --check: at this gateway, which runs.")
@click.option("--config-schema", is_flag=True, help="Print the JSON schema of the file.")
@click.option(
    "--upstream", "upstreams", multiple=True, metavar="[POOL=]URL",
    help="Server that answers: http://HOST:PORT, or those of k8s://NAMESPACE/SERVICE:PORT "
    "(repeatable).",
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
    "--upstream-dns", "dns", multiple=True, metavar="URL",
    help="Every address of the URL's name is an upstream; asked for every 5 seconds (repeatable).",
)  # fmt: skip
@click.option(
    "--upstream-key", metavar="KEY", envvar="OCTAVO_UPSTREAM_KEY",
    help="Key that upstreams want to see. [the client's, if the gateway needs none itself]",
)  # fmt: skip
@click.option(
    "--routing", type=click.Choice(POLICIES), default="cost", show_default=True,
    help="How upstreams are chosen.",
)  # fmt: skip
@click.option(
    "--max-inflight", type=count(1, 1 << 16), default=256, show_default=True,
    help="Requests at an upstream at once; others wait at the gateway.",
)  # fmt: skip
@click.option(
    "--max-queue", type=count(0, 1 << 20), default=1024, show_default=True,
    help="Requests that wait before new ones get 503.",
)  # fmt: skip
@click.option(
    "--queue-timeout", type=Number(0), default=30, show_default=True, metavar="SECONDS",
    help="Seconds that a request waits for an upstream.",
)  # fmt: skip
@click.option(
    "--connect-timeout", type=Number(0.01), default=2, show_default=True,
    metavar="SECONDS", help="Seconds to reach an upstream.",
)  # fmt: skip
@click.option(
    "--first-token-timeout", type=Number(0.01), default=120, show_default=True,
    metavar="SECONDS", help="Seconds until a stream begins.",
)  # fmt: skip
@click.option(
    "--idle-timeout", type=Number(0.01), default=10, show_default=True,
    metavar="SECONDS",
    help="Seconds between parts of a stream; three times that of servers other than Octavo.",
)  # fmt: skip
@click.option(
    "--total-timeout", type=Number(0.01), default=3600, show_default=True,
    metavar="SECONDS", help="Seconds for an answer that is not streamed.",
)  # fmt: skip
@click.option(
    "--probe-interval", type=Number(0.05), default=2, show_default=True,
    metavar="SECONDS", help="Seconds between probes of an upstream.",
)  # fmt: skip
@click.option(
    "--hedge", type=Hedge(), metavar="SECONDS|p95",
    help="Ask a second upstream after so long without a first byte. [never]",
)  # fmt: skip
@click.option(
    "--response-cache", type=count(0, 1 << 40), default=0, show_default=True, metavar="BYTES",
    help="Keep answers of requests with temperature 0 or a seed, of so many bytes together.",
)  # fmt: skip
@click.option("--host", metavar="HOST", default="127.0.0.1", show_default=True,
              envvar="OCTAVO_HOST", help="Address to listen on.")  # fmt: skip
@click.option(
    "--port", type=count(0, 65535), default=8080, show_default=True,
    envvar="OCTAVO_PORT", help="Port to listen on; 0 for any that is free.",
)  # fmt: skip
@click.option("--api-key", "api_keys", metavar="KEY", multiple=True, envvar="OCTAVO_API_KEY",
              help="Require this key (repeatable).")  # fmt: skip
@click.option("--admin-key", metavar="KEY", envvar="OCTAVO_ADMIN_KEY",
              help="Require this key to see and change upstreams.")  # fmt: skip
@click.option(
    "--keys", metavar="FILE|URL", envvar="OCTAVO_KEYS",
    help="Require a key of this file or postgresql:// database, which octavo key writes.",
)  # fmt: skip
@click.option("--limits-url", metavar="URL", envvar="OCTAVO_LIMITS_URL",
              help="Valkey in which several gateways count limits together.")  # fmt: skip
@click.option("--allowed-host", "allowed_hosts", multiple=True, metavar="NAME",
              help="Name that clients may call this gateway by (repeatable).")  # fmt: skip
@click.option("--cors-origin", "cors_origins", multiple=True, metavar="ORIGIN",
              help="Web pages that may call this gateway (repeatable).")  # fmt: skip
@click.option(
    "--database", metavar="URL", envvar="OCTAVO_DATABASE",
    help="SQLite file or postgresql:// URL that keeps releases and experiments; gateways with the "
    "same one agree. [in memory]",
)  # fmt: skip
@click.option(
    "--data-dir", "data", type=click.Path(file_okay=False), metavar="FOLDER",
    envvar="OCTAVO_DATA_DIR",
    help="Folder that keeps files and batches. [one that ends with the gateway]",
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
@click.option("--no-ui", "ui", flag_value=False, default=True, help="Leave out the page at /.")
@watching_options
def gateway(
    config_file: Path | None, check: bool, server: str | None, config_schema: bool,
    watching: Watching, **given: Any,
) -> None:  # fmt: skip
    """Answer for any number of servers at one address: Octavo, vLLM, SGLang, llama.cpp, any that
    speaks OpenAI's API."""

    from octavo.cli.gateway_config import access_of, check_start, configured, show_changes
    from octavo.errors import UsageError

    if config_schema:
        from octavo.gateway.config import schema

        return say_json(schema())
    if server is not None and not check:
        raise UsageError("--server is compared with by --check", "--check")
    made = configured(config_file, given)
    if server is not None:
        return show_changes(made, Remote(server, given["admin_key"]))
    access = access_of(made, given, opened=not check)
    check_start(made, access, config_file)
    if check:
        return show_changes(made, None)

    import uvloop

    from octavo.gateway.run import GatewayOptions, serve
    from octavo.server.logs import logging_to
    from octavo.server.ports import bind

    options = GatewayOptions(
        access, made.config, made.server, config_file, made.environ, watchers=watching.open()
    )
    sock = bind(made.server.host, made.server.port)
    screen = _Screen(url_of(made.server.host, sock.getsockname()[1]), made.server.ui)
    unmap_freed_blocks()
    with logging_to(sys.stdout, made.server.log_level, made.server.log_format):
        uvloop.run(serve(options, sock, ready=screen.ready, ended=screen.count))
    screen.goodbye()


class _Screen:
    """What the terminal shows of a gateway."""

    def __init__(self, url: str, ui: bool) -> None:
        self._url, self._ui = url, ui
        self.requests = self.errors = 0

    def ready(self, upstreams: Upstreams) -> None:
        from octavo import __version__

        lines = ["", f"Octavo {__version__}   gateway"]
        for up in upstreams:
            what = ", ".join(up.models) if up.state == "up" else up.reason or "has not answered yet"
            lines.append(f"  {up.state:9} {up.place.url}   {what}")
        lines += [f"  page      {self._url}/"] if self._ui else []
        lines += [f"  API       {self._url}/v1", f"  metrics   {self._url}/metrics"]
        if not any(up.state == "up" for up in upstreams):
            lines.append("  no upstream answers yet; requests wait for one (--queue-timeout)")
        say("\n".join([*lines, ""]))
        gc.freeze()  # what is imported stays; collections look at requests only

    def count(self, one: Exchange) -> None:
        if one.usage is not None:
            self.requests += 1
            self.errors += one.status >= 500

    def goodbye(self) -> None:
        say(f"passed on {self.requests} requests, {self.errors} errors; bye")
