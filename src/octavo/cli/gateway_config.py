"""The configuration of octavo gateway: of its options, or of a file beside those of its server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from octavo.cli.access import keyring_of
from octavo.cli.remote import Remote
from octavo.cli.screen import say
from octavo.errors import UsageError

if TYPE_CHECKING:
    from octavo.gateway.config import ConfigFile, Server, UpstreamPool
    from octavo.server.guard import Access

KEY = "OCTAVO_UPSTREAM_KEY"
KEYS = {"upstream_key", "api_keys", "admin_key"}  # which are in no configuration
NAMES = {"upstreams": "--upstream", "fallbacks": "--fallback", "file": "--upstream-file",
         "dns": "--upstream-dns"}  # fmt: skip


@dataclass(frozen=True)
class Configured:
    """config: as it is written; server: what it says of the server, with options in its place.
    environ: has the keys that it names."""

    config: ConfigFile
    server: Server
    environ: Mapping[str, str]


def configured(file: Path | None, given: dict[str, Any]) -> Configured:
    """What a gateway does by its file, or else by its options. Raises UsageError."""
    from octavo.gateway.config import ConfigFile, Server, read_config

    server = {name: given[name] for name in Server.__struct_fields__ if name not in KEYS}
    environ = dict(os.environ)
    if given["upstream_key"] is not None:
        environ[KEY] = given["upstream_key"]
    if file is None:
        plain = {name: given[name] for name in ConfigFile.__struct_fields__ if name in given}
        plain["upstream_key"] = f"${{{KEY}}}" if KEY in environ else None
        made = ConfigFile(**{**plain, "pools": _pools(given)})
        made.check()
        return _checked(made, Server(**server), environ)
    found = read_config(file)
    for name in given.keys() - server.keys() - KEYS:
        if _said(name):
            option = NAMES.get(name, "--" + name.replace("_", "-"))
            raise UsageError(f"{option} is a field of the file of --config; write it there")
    said = {name: value for name, value in server.items() if _said(name)}
    return _checked(found, msgspec.structs.replace(found.server, **said), environ)


def _checked(config: ConfigFile, server: Server, environ: Mapping[str, str]) -> Configured:
    """Raises UsageError."""
    server.check()
    return Configured(config, server, environ)


def _said(name: str) -> bool:
    """Whether somebody gave an option, as such or as a variable."""
    source = click.get_current_context().get_parameter_source(name)
    return source in (
        click.core.ParameterSource.COMMANDLINE,
        click.core.ParameterSource.ENVIRONMENT,
    )


def _pools(given: dict[str, Any]) -> dict[str, UpstreamPool]:
    """The pools that options name. Raises UsageError."""
    from octavo.gateway.config import UpstreamPool
    from octavo.gateway.discovery import KUBERNETES, parse_service
    from octavo.gateway.upstream import DEFAULT, FALLBACK, parse_place, split_pool

    pools: dict[str, dict[str, dict[str, None]]] = {}
    for pool, field in ((DEFAULT, "upstreams"), (FALLBACK, "fallbacks"), (DEFAULT, "dns")):
        for text in given[field]:
            named, url = split_pool(text, pool)
            if url.startswith(KUBERNETES) and field != "dns":
                parse_service(url)
            else:
                url = parse_place(text, pool).url
            of_pool = pools.setdefault(named, {"upstreams": {}, "dns": {}})
            of_pool["dns" if field == "dns" else "upstreams"][url] = None
    made = {
        n: UpstreamPool(upstreams=tuple(p["upstreams"]), dns=tuple(p["dns"]))
        for n, p in pools.items()
    }
    if given["file"] is not None:
        found = made.get(DEFAULT, UpstreamPool())
        made[DEFAULT] = msgspec.structs.replace(found, file=str(given["file"]))
    return made


def access_of(made: Configured, given: dict[str, Any], opened: bool = True) -> Access:
    """Who may use the gateway. opened: with the keys of the file or the database that it names.
    Raises OctavoError."""
    from octavo.gateway.config import secret
    from octavo.server.guard import Access

    server, environ = made.server, made.environ
    keys = given["api_keys"] or tuple(secret(k, environ) or "" for k in server.api_keys)
    admin = given["admin_key"] or secret(server.admin_key, environ)
    ring = None
    if opened or not server.keys:
        ring = keyring_of(server.keys or None, server.limits_url)
    return Access(server.host, keys, admin, server.allowed_hosts, server.cors_origins, ring)


def check_start(made: Configured, access: Access, file: Path | None) -> None:
    """Raises UsageError for what no gateway starts with, as far as nobody has to be asked."""
    from octavo.gateway.discovery import of_file

    config = made.config
    if not (config.pools or access.admin_key):
        hint = "--upstream http://127.0.0.1:8000"
        if file is not None:
            hint = "pools: {default: {upstreams: [http://127.0.0.1:8000]}}"
        raise UsageError("a gateway needs a server behind it", hint)
    config.places(made.environ), config.key(None, made.environ)  # every key is there
    for name, pool in config.pools.items():
        config.key(name, made.environ)
        if pool.file is not None:
            of_file(Path(pool.file), None, name)()


def show_changes(made: Configured, server: Remote | None) -> None:
    """Says what a configuration would change at a gateway that runs, or what it is beside the
    defaults. Raises OctavoError."""
    from octavo.gateway.config import GatewayConfig, changes

    config = made.config.running
    if server is not None:
        reply = server.object("/v1/gateway/config?dry_run=true", config)
        lines, nothing = reply["changes"], "the gateway has this configuration"
    else:
        lines, nothing = changes(GatewayConfig(), config), "all is as it is by default"
    say("\n".join(lines) or nothing)
