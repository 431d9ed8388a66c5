"""Headers that are passed on to upstreams and back to clients; others are not."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import Scope

from octavo.gateway.upstream import Upstream
from octavo.server.sender import SENDER

KEYS = ("authorization", "x-api-key")
PASSED_ON = (
    "content-type", "accept", "traceparent", "anthropic-version", "anthropic-beta",
    "x-slo-ttft-ms", "x-most-tokens", "via",
)  # fmt: skip
PASSED_BACK = ("retry-after", "retry-after-ms", "x-should-retry")


def headers_of(scope: Scope) -> dict[str, str]:
    """The headers of a request by their names, which servers make lower case: the first of each.
    Starlette's own look through all of them for every name."""
    return {k.decode("latin-1"): v.decode("latin-1") for k, v in reversed(scope["headers"])}


def onward(given: Mapping[str, str], id: str, guarded: bool, sender: str = "") -> dict[str, str]:
    """What upstreams hear of a request. guarded: keys are the gateway's own, and no business of
    theirs. sender: who sent it, whatever it says itself."""
    names = PASSED_ON if guarded else KEYS + PASSED_ON
    found = {k: v for k in names if (v := given.get(k)) is not None} | {"x-request-id": id}
    return found | {SENDER: sender} if sender else found


def with_key(headers: dict[str, str], upstream: Upstream) -> dict[str, str]:
    """The headers with the key that an upstream wants to see, if it wants one of its own. Who sent
    them is the business of Octavo's servers alone."""
    key = upstream.place.key
    hidden = (() if upstream.own else (SENDER,)) + (() if key is None else KEYS)
    if not hidden:
        return headers
    kept = {k: v for k, v in headers.items() if k not in hidden}
    return kept if key is None else kept | {"authorization": f"Bearer {key}"}


def back(given: Mapping[str, str], upstream: Upstream) -> dict[str, str]:
    """What clients hear of an answer."""
    found = {k: v for k in PASSED_BACK if (v := given.get(k)) is not None}
    return found | {"x-replica": upstream.id}
