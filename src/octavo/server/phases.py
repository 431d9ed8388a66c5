"""What a request spent its time on: phases that follow each other and add up to all of it."""

from __future__ import annotations

from octavo.server.exchange import Exchange

# What ends each is in docs/observability.md.
PHASES = ("receive", "queue", "prefill", "decode", "send")


def moments(one: Exchange) -> dict[str, tuple[float, float]]:
    """When each phase began and ended, on the clock of `one.began`. One that a request did not
    reach is left out; what came last ends with the request."""
    usage = one.usage
    ends = [usage.submitted, usage.admitted, usage.first, usage.last] if usage else []
    found, began = {}, one.began
    for phase, end in zip(PHASES, [*ends, None], strict=False):
        reached = end is not None and end <= one.ended
        stop = max(began, end) if end is not None and reached else one.ended
        found[phase] = (began, stop)
        if not reached:
            break
        began = stop
    return found


def phases(one: Exchange) -> dict[str, float]:
    """Seconds of each phase."""
    return {phase: end - began for phase, (began, end) in moments(one).items()}
