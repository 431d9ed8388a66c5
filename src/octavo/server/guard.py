"""Who may ask: keys, host names, and the web pages that browsers speak for."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.errors import RequestError, UsageError
from octavo.server.http import error_response

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s?#]+")
METHODS = ("GET", "POST", "HEAD", "OPTIONS")


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

    @property
    def checks_host(self) -> bool:
        return bool(self.hosts) or _loopback(self.host)


@dataclass(frozen=True)
class Principal:
    """Who asks. salt: keeps cached prefixes apart, empty for anybody. admin: may load adapters."""

    salt: str = ""
    admin: bool = False


def principal(scope: Scope) -> Principal:
    """Who asks, as the guard has found out."""
    found = scope["principal"]
    assert isinstance(found, Principal)
    return found


def require_admin(scope: Scope) -> None:
    """Raises RequestError for those who may not change what the server serves."""
    asking = principal(scope)
    if not asking.admin:
        kind = Forbidden if asking.salt else Unauthorized
        raise kind("this needs the key given to --admin-key", None, "admin_key_required")


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _hostname(header: str) -> str:
    """The name in a Host header, or nothing if it is no such header."""
    try:
        name = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
    return "" if set(header) & set("@/?#\\") else name.rstrip(".")


def _numeric(name: str) -> bool:
    """Whether it is an address: what a rebound name never is."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [v for k, v in scope["headers"] if k == name]


class Hosts:
    """ASGI middleware: web pages reach a local server by no name but its own."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access
        self._names = {"localhost", access.host.lower(), *(h.lower() for h in access.hosts)}

    def check(self, scope: Scope) -> None:
        """Raises Forbidden for a host or an origin that is not this server's."""
        given = _values(scope, b"host")
        if len(given) > 1 or (not given and scope["http_version"] != "1.0"):
            raise RequestError("a request has one Host header", None, "invalid_host")
        host = given[0].decode("latin-1").lower() if given else "localhost"
        name = _hostname(host)
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
        # With keys, a page can do nothing that its user has not given it a key for.
        preflight = _values(scope, b"access-control-request-method")
        if preflight or (access.checks_host and not access.api_keys):
            raise Forbidden(
                f"pages of {origin[:64]!r} may not use this server; start it with "
                "--cors-origin ORIGIN if they should", None, "origin_not_allowed",
            )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self.check(scope)
        except RequestError as e:
            return await refuse(e, scope, receive, send)
        await self._app(scope, receive, send)


class Keys:
    """ASGI middleware: finds out who asks. With API keys, every path but health needs one."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._keys = [_digest(k.encode()) for k in access.api_keys]
        self._admin = [] if access.admin_key is None else [_digest(access.admin_key.encode())]

    def principal(self, scope: Scope) -> Principal | None:
        """Who asks, None for those who may not."""
        given = _values(scope, b"authorization")
        digest = b""
        if len(given) == 1 and given[0][:7].lower() == b"bearer ":
            digest = _digest(given[0][7:].strip())
        admin, known = _among(digest, self._admin), _among(digest, self._keys)
        if admin or known:
            return Principal(_digest(b"salt" + digest).hex()[:16], admin)
        if self._keys and scope.get("path") not in OPEN_PATHS:
            return None
        return Principal(admin=not self._keys and not self._admin)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asking = self.principal(scope)
        if asking is None:
            error = Unauthorized("a valid API key is needed", None, "invalid_api_key")
            return await refuse(error, scope, receive, send)
        scope["principal"] = asking
        await self._app(scope, receive, send)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _among(digest: bytes, known: list[bytes]) -> bool:
    """Whether it is one of them; takes as long whichever it is."""
    matches = [hmac.compare_digest(digest, k) for k in known]  # always all
    return any(matches)


async def refuse(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers in place of the application, whatever kind of request it is."""
    if scope["type"] == "websocket":
        return await send({"type": "websocket.close", "code": 1008})
    await error_response(error, scope)(scope, receive, send)


def guarded(app: ASGIApp, access: Access) -> ASGIApp:
    """The application behind its checks: names, then preflights of web pages, then keys."""
    app = Keys(app, access)
    if access.origins:
        app = CORSMiddleware(
            app, allow_origins=access.origins, allow_methods=METHODS, allow_headers=["*"],
            expose_headers=["retry-after", "retry-after-ms", "x-should-retry"],
            allow_private_network=True,
        )  # fmt: skip
    return Hosts(app, access)
