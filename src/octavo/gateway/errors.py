"""What clients are told when no upstream answers."""

from __future__ import annotations

from octavo.errors import RequestError


class UpstreamFailed(RequestError):
    """An upstream did not answer, or broke off. busy: it may be overloaded, so that asking again
    may make that worse; else it is gone."""

    status = 502

    def __init__(self, message: str, code: str = "upstream_failed", busy: bool = False) -> None:
        super().__init__(message, None, code)
        self.busy = busy
        if code == "upstream_timeout":
            self.status = 504


class NoUpstream(RequestError):
    """Nobody can take the request now."""

    status = 503

    def __init__(self, message: str, code: str, retry_after: float) -> None:
        super().__init__(message, None, code)
        self.retry_after = retry_after


class UnknownModel(RequestError):
    status = 404

    def __init__(self, model: str, known: list[str], pool: str = "") -> None:
        who = f"no upstream of the pool {pool!r}" if pool else "no upstream"
        names = ", ".join(known[:8]) or "none yet"
        text = f"{who} serves {model[:64]!r}; known models: {names}"
        super().__init__(text, "model", "model_not_found")
