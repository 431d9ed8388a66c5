"""Whom a request is computed for: who has its key, or one of several who send with that key.

A gateway sends all that it gets under one key, and names each sender in a header. Senders share
nothing that is cached, which any key may wish for. Shares of the work are theirs only if the key is
an admin's: others could have several by naming several.
"""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple

from starlette.requests import Request

from octavo.server.guard import principal

SENDER = "x-sender"  # of a request


class ComputedFor(NamedTuple):
    """salt: keeps what is cached apart. tenant: has an equal share of the work."""

    salt: str
    tenant: str


def computed_for(request: Request) -> ComputedFor:
    """What engines hear of who sent a request."""
    key = principal(request.scope)
    if not (named := request.headers.get(SENDER)):
        return ComputedFor(key.salt, key.salt)
    own = sha256(f"{key.salt}/{named}".encode()).hexdigest()[:32]
    return ComputedFor(own, own if key.admin else key.salt)
