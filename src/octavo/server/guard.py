"""Access control: host names, origins of web pages, API keys, and who sent a request."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.errors import RequestError, UsageError
from octavo.server.http import refuse
from octavo.server.keyring import Keyring
from octavo.server.keys import digest as digest_of
from octavo.server.keys import salt_of
from octavo.server.limits import RATE_HEADERS, Account

OPEN_PATHS = frozenset({"/", "/health", "/health/live", "/health/ready", "/docs", "/openapi.json"})
PAGE = "/ui/"  # files of the page, which asks for a key itself
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s?#]+")
EXPOSED = ("retry-after", "retry-after-ms", "x-should-retry", "x-request-id", *RATE_HEADERS)
REMEMBERED = 256  # host names, which need not be read again
LONGEST_HOST = 300  # characters; a name has 253 at most
METHODS = ("GET", "POST", "DELETE", "HEAD", "OPTIONS")


class Unauthorized(RequestError):
    status = 401


class Forbidden(RequestError):
    status = 403


@dataclass(frozen=True)
class Access:
    """Who may use a server, as its options say.

    host: the address it listens on. hosts: names it may be called by; with none given and a host
    that only this machine reaches, that host's own. origins: of web pages that may call it.
    """

    host: str = "127.0.0.1"
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    keyring: Keyring | None = None  # further keys, from a file

    def __post_init__(self) -> None:
        """Raises UsageError for what would guard nothing."""
        keys = self.api_keys if self.admin_key is None else (*self.api_keys, self.admin_key)
        if not all(k.strip() for k in keys):
            raise UsageError("a key is empty, which would keep nobody out")
        if self.admin_key in self.api_keys:
            raise UsageError("--admin-key is one of the API keys; it must be another")
        for origin in self.origins:
            if not ORIGIN.fullmatch(origin):
                raise UsageError(
                    f"--cors-origin {origin!r} is no origin", "--cors-origin http://localhost:3000"
                )

    @cached_property
    def checks_host(self) -> bool:
        return bool(self.hosts) or _loopback(self.host)


@dataclass(frozen=True)
class Principal:
    """Who sent a request. salt: of the key, separates cached prefixes. admin: may load adapters and
    models. account: of a key from the file, with its limits."""

    salt: str = ""
    admin: bool = False
    account: Account | None = None

    def check_model(self, name: str) -> None:
        """Raises Forbidden for a model that the key may not use."""
        models = self.account.key.models if self.account else ()
        if models and name not in models:
            raise Forbidden(f"this key may not use {name!r}", "model", "model_not_allowed")


def principal(scope: Scope) -> Principal:
    """The sender of a request, as `guarded` has set it."""
    found = scope["principal"]
    assert isinstance(found, Principal)
    return found


def require_admin(scope: Scope) -> None:
    """Raises RequestError unless the sender may change what the server serves."""
    asking = principal(scope)
    if not asking.admin:
        kind = Forbidden if asking.salt else Unauthorized
        message = "this needs the key given to --admin-key, or one with the role admin"
        raise kind(message, None, "admin_key_required")


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


@lru_cache(REMEMBERED)
def _hostname(header: str) -> str:
    """The name in a Host header, "" if the header is malformed."""
    try:
        name = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
    return "" if set(header) & set("@/?#\\") else name.rstrip(".")


@lru_cache(REMEMBERED)
def _numeric(name: str) -> bool:
    """True for an IP address, which a rebound DNS name never is."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [v for k, v in scope["headers"] if k == name]


class Check:
    """ASGI middleware: `check` raises RequestError for requests, HTTP or WebSocket, it refuses."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope], None]) -> None:
        self._app = app
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            try:
                self._check(scope)
            except RequestError as e:
                return await refuse(e, scope, receive, send)
        await self._app(scope, receive, send)


class Hosts:
    """Web pages may reach a local server only under its own names, and only from known origins."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._names = {"localhost", access.host.lower(), *(h.lower() for h in access.hosts)}

    def check(self, scope: Scope) -> None:
        """Raises Forbidden for a host or an origin that is not this server's."""
        given = _values(scope, b"host")
        if len(given) > 1 or (not given and scope["http_version"] != "1.0"):
            raise RequestError("a request has one Host header", None, "invalid_host")
        host = given[0].decode("latin-1").lower() if given else "localhost"
        name = _hostname(host) if len(host) <= LONGEST_HOST else ""
        known = name in self._names or name.endswith(".localhost") or _numeric(name)
        if self._access.checks_host and not known and "*" not in self._names:
            raise Forbidden(
                f"this server is not called {name[:64] or host[:64]!r}; start it with "
                f"--allowed-host NAME if it is", None, "host_not_allowed",
            )  # fmt: skip
        if origins := _values(scope, b"origin"):
            self._check_origin(scope, host, b",".join(origins).decode("latin-1"))

    def _check_origin(self, scope: Scope, host: str, origin: str) -> None:
        access = self._access
        if "*" in access.origins or origin in access.origins:
            return
        if origin.partition("://")[2].lower() == host:
            return  # a page of this very server
        # With keys, a page can do nothing that its user has not given it a key for. Browsers send
        # no preflight before they open a WebSocket, and let the page read what comes.
        asks = _values(scope, b"access-control-request-method") or scope["type"] == "websocket"
        if asks or (access.checks_host and not (access.api_keys or access.keyring)):
            raise Forbidden(
                f"pages of {origin[:64]!r} may not use this server; start it with "
                "--cors-origin ORIGIN if they should", None, "origin_not_allowed",
            )  # fmt: skip


class Keys:
    """Sets the Principal of every request. With API keys, all need one but what is open."""

    def __init__(self, access: Access) -> None:
        self._keys = [digest_of(k.encode()) for k in access.api_keys]
        self._ring = access.keyring
        self._admin = [] if access.admin_key is None else [digest_of(access.admin_key.encode())]

    def check(self, scope: Scope) -> None:
        """Sets scope["principal"]. Raises Unauthorized without a key where one is needed."""
        digest = b""
        given = _values(scope, b"authorization")
        if len(given) == 1 and given[0][:7].lower() == b"bearer ":
            digest = digest_of(given[0][7:].strip())
        elif not given and len(keys := _values(scope, b"x-api-key")) == 1:  # Anthropic's
            digest = digest_of(keys[0].strip())
        admin, known = _among(digest, self._admin), _among(digest, self._keys)
        account = self._ring.find(digest) if self._ring is not None else None
        if admin or known or account is not None:
            admin |= account is not None and account.key.role == "admin"
            scope["principal"] = Principal(salt_of(digest), admin, account)
        elif (self._keys or self._ring is not None) and not _open(scope):
            raise Unauthorized("a valid API key is needed", None, "invalid_api_key")
        else:
            guarded = self._keys or self._admin or self._ring is not None
            scope["principal"] = Principal(admin=not guarded)

    def owner(self, salt: str) -> Principal:
        """Who was here with a key of that salt. Raises Unauthorized once the key is none."""
        account = self._ring.owner(salt) if self._ring is not None else None
        known = {salt_of(digest) for digest in (*self._keys, *self._admin)}
        if account is None and salt not in known and (self._keys or self._ring is not None):
            raise Unauthorized("the key is not valid any longer", None, "invalid_api_key")
        return Principal(salt, account=account)


def _open(scope: Scope) -> bool:
    path = scope.get("path", "")
    return scope["type"] == "http" and (path in OPEN_PATHS or path.startswith(PAGE))


def _among(digest: bytes, known: list[bytes]) -> bool:
    """True if the digest is known. Takes the same time whichever matches."""
    matches = [hmac.compare_digest(digest, k) for k in known]  # always all
    return any(matches)


def guarded(app: ASGIApp, access: Access) -> ASGIApp:
    """The application behind its checks: host names, then CORS preflights, then keys."""
    app = Check(app, Keys(access).check)
    if access.origins:
        app = CORSMiddleware(
            app, allow_origins=access.origins, allow_methods=METHODS, allow_headers=["*"],
            expose_headers=EXPOSED,
            allow_private_network=True,
        )  # fmt: skip
    return Check(app, Hosts(access).check)
