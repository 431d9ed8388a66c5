"""Notices requests that come back to the gateway that has passed them on.

Gateways write their names into `via`, as every proxy may, and look for their own: one may ask
another, but none may be among its own upstreams, or among those of one that it asks.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import ASGIApp, Scope

from octavo.gateway.errors import LoopDetected
from octavo.server.guard import Check

VIA = "via"


def signed(headers: Mapping[str, str], name: str) -> dict[str, str]:
    """The headers of a request that the gateway of this name passes on."""
    before = headers.get(VIA)
    return {**headers, VIA: f"{before}, 1.1 {name}" if before else f"1.1 {name}"}


def refusing_own(app: ASGIApp, name: str) -> ASGIApp:
    """The application behind a check that refuses what the gateway of this name has sent."""
    own = name.encode()

    def check(scope: Scope) -> None:
        """Raises LoopDetected."""
        if any(key == b"via" and own in value for key, value in scope["headers"]):
            raise LoopDetected()

    return Check(app, check)
