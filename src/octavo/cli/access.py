"""Where a server is reached, and by whom: what `serve` and `gateway` read of their options."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.server.keyring import Keyring


def keyring_of(keys: str | None, limits_url: str | None) -> Keyring | None:
    """The keys of a file or a database, whose limits may be shared by servers. Raises
    OctavoError."""
    from octavo.errors import UsageError
    from octavo.server.keyring import Keyring
    from octavo.server.keys import KeyStore

    if limits_url is None:
        return Keyring(KeyStore(keys)) if keys is not None else None
    if keys is None:
        raise UsageError("--limits-url shares the limits of keys; name their file", "--keys FILE")
    from octavo.server.shared_limits import SharedLimits, open_valkey

    return Keyring(KeyStore(keys), SharedLimits(open_valkey(limits_url)))


def url_of(host: str, port: int) -> str:
    """An address that this machine reaches the server by."""
    shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"
