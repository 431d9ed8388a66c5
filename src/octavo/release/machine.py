"""The steps of a release: what is next, of where it stands, what was read and the time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from octavo.errors import RequestError
from octavo.release.spec import ReleaseSpec
from octavo.release.tally import BASELINE, CANARY, STABLE, Reading, ReleaseSummary

Phase = Literal["running", "paused", "promoted", "rolled_back"]
Action = Literal["promote", "finish", "pause", "resume", "rollback"]
ENDED: tuple[Phase, ...] = ("promoted", "rolled_back")


class NotNow(RequestError):
    """What cannot be done with a release that stands where it does."""

    status = 409


@dataclass(frozen=True)
class State:
    """Where a release stands. since: when its step began; events: of the canary, at that time.
    began: when the canary got its first request. reason: why it stands there."""

    phase: Phase
    step: int
    since: float
    began: float
    events: int = 0
    reason: str = "started"


def start(now: float) -> State:
    return State("running", 0, now, now)


def advance(spec: ReleaseSpec, state: State, seen: ReleaseSummary, now: float) -> State:
    """What the release does next; the same state if that is nothing."""
    if state.phase in ENDED:
        return state
    for reading in seen.readings:
        if reading.fired:
            return replace(state, phase="rolled_back", since=now, reason=_breach(reading))
    held = now - state.since
    if state.phase == "paused" or held < spec.plan[state.step][1]:
        return state
    events = seen.canary - state.events
    watched = [r for r in seen.readings if r.watched]
    if events >= spec.min_events and not watched:
        return _next(spec, state, seen.canary, now, f"{events} requests, no guard against it")
    if held < spec.patience:
        return state
    why = (
        f"{watched[0].title} is undecided" if watched else f"{events} of {spec.min_events} requests"
    )
    phase: Phase = "paused" if spec.on_inconclusive == "pause" else "rolled_back"
    return replace(state, phase=phase, since=now, reason=f"after {held:.0f} s: {why}")


def _next(spec: ReleaseSpec, state: State, events: int, now: float, reason: str) -> State:
    if state.step + 1 == len(spec.plan):
        return replace(state, phase="promoted", since=now, reason=reason)
    return State("running", state.step + 1, now, state.began, events, reason)


def _breach(reading: Reading) -> str:
    f = reading.figures
    other = "" if f.other is None else f", baseline {f.other:.4g} of {f.other_count}"
    value = "nothing" if f.value is None else f"{f.value:.4g} of {f.count}"
    return f"{reading.title}: canary {value}{other}"


def act(spec: ReleaseSpec, state: State, action: Action, events: int, now: float, by: str) -> State:
    """What somebody wants. promote: the next step now; finish: all requests now, for good.
    Raises NotNow."""
    if state.phase in ENDED:
        raise NotNow(f"the release of {spec.model} is {state.phase.replace('_', ' ')} already")
    reason = f"{action} by {by}"
    if action == "promote":
        return _next(spec, state, events, now, reason)
    if action == "finish":
        return replace(state, phase="promoted", since=now, reason=reason)
    if action == "rollback":
        return replace(state, phase="rolled_back", since=now, reason=reason)
    if (action == "pause") == (state.phase == "paused"):
        raise NotNow(f"the release of {spec.model} is {state.phase} already")
    if action == "pause":
        return replace(state, phase="paused", reason=reason)
    return State("running", state.step, now, state.began, events, reason)


def shares(spec: ReleaseSpec, state: State) -> dict[str, float]:
    """Each arm's share of the requests."""
    if state.phase in ENDED:
        winner = CANARY if state.phase == "promoted" else STABLE
        return {winner: 1.0}
    canary = spec.plan[state.step][0]
    baseline = min(canary, 1 - canary) if spec.baseline else 0.0
    found = {CANARY: canary, BASELINE: baseline, STABLE: 1 - canary - baseline}
    return {arm: share for arm, share in found.items() if share > 0}


def arm(spec: ReleaseSpec, state: State, point: float) -> str:
    """Which version serves a unit that lies at a point of [0, 1). Shares only grow from their ends:
    the canary's from 0 up, the baseline's from 1 down."""
    found = shares(spec, state)
    if point < found.get(CANARY, 0.0):
        return CANARY
    return BASELINE if point >= 1 - found.get(BASELINE, 0.0) else STABLE
