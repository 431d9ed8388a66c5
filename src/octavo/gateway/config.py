"""What a gateway does, as one file says it: decoded, checked, compared."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from octavo.database import check_url
from octavo.engine.plan import parse_size
from octavo.errors import UsageError
from octavo.gateway.discovery import KUBERNETES, parse_service
from octavo.gateway.upstream import DEFAULT, FALLBACK, Place, parse_place
from octavo.yaml_file import parse_yaml, reading

Routing = Literal["cost", "least-load", "round-robin", "prefix-hash", "random"]
# A variable, so that neither the file nor its history has keys in it. OCTAVO_: whoever may change
# the configuration cannot send other variables of the process to an upstream of theirs.
Key = Annotated[str, Meta(pattern=r"^\$\{OCTAVO_[A-Z0-9_]+\}$")]
Seconds = Annotated[float, Meta(ge=0.01, le=86_400)]
ALL = 1 << 50  # bytes of memory, where only the form of an amount counts
Of = TypeVar("Of", bound=msgspec.Struct)


class Server(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is only read at the start; options and variables of the same names win over it."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535)] = 8080
    api_keys: tuple[Key, ...] = ()
    admin_key: Key | None = None
    keys: str | None = None
    limits_url: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    database: str | None = None
    data: str | None = None
    drain_timeout: Annotated[int, Meta(ge=0, le=86_400)] = 30
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    ui: bool = True

    def check(self) -> None:
        """Raises UsageError for what can be seen to be wrong before anything is opened."""
        for url in (self.database, self.keys):
            if url is not None:
                check_url(url)


class Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An upstream that wants a key of its own."""

    url: str
    key: Key | None = None


class LocalModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model that the gateway's own servers serve, and how: as options of `octavo serve`.
    replicas: servers, each with so much memory and so many threads."""

    model: Annotated[str, Meta(min_length=1)]
    name: Annotated[str, Meta(min_length=1)] | None = None
    replicas: Annotated[int, Meta(ge=1, le=64)] = 1
    memory: str | None = None
    context: Annotated[int, Meta(ge=1)] | None = None
    threads: Annotated[int, Meta(ge=1, le=256)] | None = None
    kv_dtype: Literal["auto", "bf16", "int8", "f32"] = "auto"
    activations: Literal["auto", "int8", "int16"] = "auto"


class UpstreamPool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Upstreams that serve the same. file: names one a line; dns: every address of such a URL's
    name is one; key: that they want to see, in place of the gateway's `upstream_key`; local: a
    model whose servers the gateway starts itself."""

    upstreams: tuple[str | Address, ...] = ()
    file: str | None = None
    dns: tuple[str, ...] = ()
    key: Key | None = None
    local: LocalModel | None = None

    def addresses(self, scheme: str = "http") -> list[Address]:
        """Of `upstreams`; with another scheme those that are to be asked for."""
        found = [Address(one) if isinstance(one, str) else one for one in self.upstreams]
        return [a for a in found if a.url.startswith(KUBERNETES) == (scheme == KUBERNETES)]


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """pool: that serves a model; fallback: pools for when nobody in it can, in order;
    prepared_answer: a text for when nobody in any can."""

    pool: str = DEFAULT
    fallback: tuple[str, ...] = (FALLBACK,)
    prepared_answer: Annotated[str, Meta(min_length=1, max_length=1 << 16)] | None = None


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All that may change while a gateway serves. Models that are not named go to `default`."""

    pools: dict[str, UpstreamPool] = {}
    models: dict[str, Model] = {}
    upstream_key: Key | None = None
    routing: Routing = "cost"
    max_inflight: Annotated[int, Meta(ge=1, le=1 << 16)] = 256
    max_queue: Annotated[int, Meta(ge=0, le=1 << 20)] = 1024
    queue_timeout: Annotated[float, Meta(ge=0, le=86_400)] = 30.0
    connect_timeout: Seconds = 2.0
    first_token_timeout: Seconds = 120.0
    idle_timeout: Seconds = 10.0
    total_timeout: Seconds = 3600.0
    probe_interval: Annotated[float, Meta(ge=0.05, le=3600)] = 2.0
    response_cache: Annotated[int, Meta(ge=0, le=1 << 40)] = 0  # bytes
    hedge: Seconds | Literal["p95"] | None = None

    def check(self) -> None:
        """Raises UsageError for what fits each field and not together."""
        seen: dict[str, str] = {}
        for name, pool in self.pools.items():
            for one in pool.addresses(KUBERNETES):
                parse_service(one.url)
            for place in (*pool.addresses(), *map(Address, pool.dns)):
                at = parse(place.url, name).id
                if seen.setdefault(at, name) != name:
                    raise UsageError(f"pools.{name}: {at} is in the pool {seen[at]}, too")
            if pool.local is not None and pool.local.memory is not None:
                parse_size(pool.local.memory, ALL, f"pools.{name}.local.memory:")
        known = {DEFAULT, FALLBACK, *self.pools}
        for name, model in self.models.items():
            for each in (model.pool, *model.fallback):
                if each not in known:
                    raise UsageError(
                        f"models.{name}: no pool is named {each!r}; "
                        f"pools: {', '.join(sorted(self.pools)) or 'none'}"
                    )

    def places(self, environ: Mapping[str, str]) -> list[Place]:
        """The upstreams that are named one by one. Raises UsageError."""
        return [
            parse(one.url, name, self.key(name, environ, one.key))
            for name, pool in self.pools.items() for one in pool.addresses()
        ]  # fmt: skip

    def key(
        self, pool: str | None, environ: Mapping[str, str], own: str | None = None
    ) -> str | None:
        """The key that upstreams of a pool want to see. own: of one of them. Raises UsageError."""
        of_pool = self.pools[pool].key if pool in self.pools else None
        return secret(own or of_pool or self.upstream_key, environ)


class ConfigFile(GatewayConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file."""

    server: Server = Server()

    @property
    def running(self) -> GatewayConfig:
        """What may change while it serves."""
        fields = GatewayConfig.__struct_fields__
        return GatewayConfig(**{name: getattr(self, name) for name in fields})


def parse(url: str, pool: str, key: str | None = None) -> Place:
    """The place of an upstream. Raises UsageError."""
    try:
        return parse_place(url, pool, key)
    except UsageError as e:
        raise UsageError(str(e).replace("--upstream", f"pools.{pool}:")) from None


def secret(name: str | None, environ: Mapping[str, str]) -> str | None:
    """What `${NAME}` stands for. Raises UsageError."""
    if name is None:
        return None
    if not (found := environ.get(name[2:-1])):
        raise UsageError(f"{name[2:-1]} is not set in the gateway's environment")
    return found


def read_config(file: Path) -> ConfigFile:
    """A gateway's file. Raises UsageError, which names it."""
    with reading(f"--config {str(file)!r}"):
        return parse_config(file.read_bytes())


def parse_config(text: str | bytes) -> ConfigFile:
    """A file's contents, in YAML or JSON. Raises UsageError."""
    value = parse_yaml(text)
    return convert({} if value is None else value, ConfigFile)


def convert(value: Any, kind: type[Of]) -> Of:
    """A configuration of what was decoded. Raises UsageError, which names the field."""
    if isinstance(value, dict):
        for section, one in (("pools", UpstreamPool), ("models", Model)):
            if isinstance(entries := value.get(section), dict):
                for name, entry in entries.items():
                    _convert(entry, one, f"{section}.{name}")
    found = _convert(value, kind, "")
    if isinstance(found, GatewayConfig):
        found.check()
    return found


def _convert(value: Any, kind: type[Of], at: str) -> Of:
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as e:
        what, _, path = str(e).partition(" - at `$")
        named = ".".join(part for part in (at, path.rstrip("`").lstrip(".")) if part)
        if found := re.match(r"Object contains unknown field `(.*)`$", what):
            near = f"{named}.{found[1]}" if named else found[1]
            raise UsageError(f"{near} is no field of the configuration") from None
        if found := re.match("Invalid enum value (.*)$", what):
            takes = ", ".join(_allowed(kind, path.rstrip("`").lstrip(".").split(".")))
            what = f"{found[1]} is none of {takes}"
        if "matching regex" in what:
            what = "Expected a variable like ${OCTAVO_UPSTREAM_KEY}, so that no key is in the file"
        raise UsageError(f"{named or 'the configuration'}: {what}") from None


def _allowed(kind: Any, path: list[str]) -> list[str]:
    """What a field, whose values are a few texts, may be."""
    if path:
        parts = [one for one in (kind, *get_args(kind)) if isinstance(one, type)]
        of = next(one for one in parts if issubclass(one, msgspec.Struct))
        return _allowed(get_type_hints(of)[path[0]], path[1:])
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if kind is float:
        return ["a number"]
    return [each for one in get_args(kind) for each in _allowed(one, [])]


def schema() -> dict[str, Any]:
    """The JSON schema of the file."""
    return msgspec.json.schema(ConfigFile)


def changes(old: GatewayConfig, new: GatewayConfig) -> list[str]:
    """What differs, a line for each: what is gone, new, or another."""
    before, after = _leaves(msgspec.to_builtins(old)), _leaves(msgspec.to_builtins(new))
    lines = []
    for path in sorted(before.keys() | after.keys()):
        was, now = before.get(path), after.get(path)
        if path in before and path in after:
            lines += [f"~ {path}: {_text(was)} -> {_text(now)}"] if was != now else []
        elif was or now:  # of a pool, what it does not have is no news
            lines.append(f"+ {path}: {_text(now)}" if path in after else f"- {path}: {_text(was)}")
    return lines


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Values by their paths; each entry of `upstreams` and `dns` is one of its own."""
    if isinstance(value, dict) and path.count(".") < 2:
        parts = {f"{path}.{name}" if path else str(name): one for name, one in value.items()}
        return {p: leaf for at, one in parts.items() for p, leaf in _leaves(one, at).items()}
    if path.rpartition(".")[2] in ("upstreams", "dns"):
        urls = [one["url"] if isinstance(one, dict) else one for one in value]
        return {f"{path}[{url}]": one for url, one in zip(urls, value, strict=True)}
    return {path: value}
