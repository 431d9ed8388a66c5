"""What clients are told when no upstream answers."""

from __future__ import annotations

from octavo.errors import RequestError

NOT_FOUND = "response_not_found"


class UpstreamFailed(RequestError):
    """An upstream did not answer, or broke off. busy: it may be overloaded, so that asking again
    may make that worse; else it is gone. rest: seconds in which it wants no more requests."""

    status = 502
    rest = 0.0

    def __init__(self, message: str, code: str = "upstream_failed", busy: bool = False) -> None:
        super().__init__(message, None, code)
        self.busy = busy
        self.status = {"upstream_timeout": 504, "overloaded": 503}.get(code, self.status)


class Exhausted(UpstreamFailed):
    """The gateway itself has no handle or memory left for a connection, which says nothing of the
    upstream."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the gateway cannot connect to anybody: {why}", "overloaded", True)


class RolledBack(UpstreamFailed):
    """An upstream has a version that was rolled back before it answered, which is no fault of the
    upstream."""

    def __init__(self, upstream: str) -> None:
        super().__init__(f"upstream {upstream} has a version that was rolled back")


class LoopDetected(RequestError):
    """The gateway has passed this request on itself; whoever sends it again sends it round."""

    status = 508

    def __init__(self) -> None:
        text = (
            "the request came back to the gateway that has passed it on: it is among its own "
            "upstreams, or among those of a gateway that it asks; compare GET /v1/upstreams of each"
        )
        super().__init__(text, None, "loop_detected")


class NoUpstream(RequestError):
    """Nobody can take the request now."""

    status = 503

    def __init__(self, message: str, code: str, retry_after: float) -> None:
        super().__init__(message, None, code)
        self.retry_after = retry_after


class KeeperGone(RequestError):
    """Who keeps a response was removed, so that nobody knows it any more."""

    status = 404

    def __init__(self, upstream: str) -> None:
        text = f"upstream {upstream}, which keeps this response, is none of the gateway's now"
        super().__init__(text, "id", NOT_FOUND)


class UnknownModel(RequestError):
    status = 404

    def __init__(self, model: str, known: list[str], pool: str = "") -> None:
        who = f"no upstream of the pool {pool!r}" if pool else "no upstream"
        names = ", ".join(known[:8]) or "none yet"
        text = f"{who} serves {model[:64]!r}; known models: {names}"
        super().__init__(text, "model", "model_not_found")


class Unusable(RequestError):
    """The gateway's database cannot be read or written."""

    status = 503

    def __init__(self, message: str) -> None:
        super().__init__(message, None, "database")
