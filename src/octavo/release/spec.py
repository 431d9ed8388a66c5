"""What a release does, as it is written in YAML or JSON, checked."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from octavo.errors import UsageError
from octavo.release.events import COVARIATES

Metric = Literal[
    "error_rate",
    "refused_rate",
    "ttft_over",
    "ttft_mean",
    "itl_mean",
    "empty_rate",
    "repeat_rate",
    "shadow_kl",
]
RATES = ("error_rate", "refused_rate", "ttft_over", "empty_rate", "repeat_rate")
MEANS = ("ttft_mean", "itl_mean")
Seconds = str | float
STEPS = (5, 10, 25, 50, 100)
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
Small = Annotated[float, Meta(gt=0, lt=1)]


def seconds(value: Seconds, name: str) -> float:
    """`90s`, `2m`, `1h`, or a number of seconds. Raises UsageError."""
    found = re.fullmatch(r"(\d+\.?\d*) ?(ms|s|m|h|d)?", str(value))
    if found is None:
        raise UsageError(f"{name}: {value!r} is no time", f"{name}: 2m")
    return float(found[1]) * _UNITS[found[2] or "s"]


def part(value: str | float, name: str) -> float:
    """`10%` or 0.1. Raises UsageError."""
    text = str(value).strip()
    try:
        found = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise UsageError(f"{name}: {value!r} is no share", f"{name}: 10%")
    return found


class ReleaseStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """weight: the canary's share of the requests, in percent. hold: for at least so long."""

    weight: str | float
    hold: Seconds | None = None

    @property
    def share(self) -> float:
        return part(f"{str(self.weight).strip().rstrip('%')}%", "weight")


class Guard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A test that rolls back. See docs/releases.md for the arithmetic.

    max: above which a rate or a mean is a breach. worse_than_baseline: by which part it may be
    worse than what it is compared with. alpha: how likely it may roll back a sound version at all.
    adjust: covariates that explain part of a mean.
    """

    metric: Metric
    max: Annotated[float, Meta(gt=0)] | None = None
    worse_than_baseline: str | float | None = None
    slo_ms: Annotated[float, Meta(gt=0)] | None = None
    alpha: Small | None = None
    adjust: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises UsageError for what cannot be tested."""
        limited, compared = self.max is not None, self.worse_than_baseline is not None
        name = f"guard {self.metric}"
        if self.metric in MEANS and not compared or limited == compared:
            ways = "worse_than_baseline" if self.metric in MEANS else "max or worse_than_baseline"
            raise UsageError(f"{name} needs {ways}, and nothing else", *_example(self.metric))
        if self.metric == "shadow_kl" and compared:
            raise UsageError(f"{name} is a comparison itself; it needs max", "max: 0.03")
        if self.metric in RATES and self.max is not None and self.max >= 1:
            raise UsageError(f"{name}: max {self.max:g} is no rate below 1", "max: 0.01")
        if (self.metric == "ttft_over") != (self.slo_ms is not None):
            raise UsageError(
                f"{name}: slo_ms belongs to ttft_over, and it needs one", "slo_ms: 800"
            )
        if compared and not 0 <= self.margin < 100:
            raise UsageError(f"{name}: worse_than_baseline is a share of 0 or more", "10%")
        if self.adjust and self.metric not in MEANS:
            raise UsageError(f"{name}: adjust is of means: {', '.join(MEANS)}")
        if unknown := set(self.adjust) - set(COVARIATES):
            known = ", ".join(COVARIATES)
            raise UsageError(f"{name}: adjust knows {known}, not {min(unknown)!r}")

    @property
    def margin(self) -> float:
        return part(self.worse_than_baseline or 0.0, "worse_than_baseline")

    @property
    def title(self) -> str:
        if self.max is not None:
            limit = f"> {self.max:g}"
        else:
            limit = f"> {1 + self.margin:g} x baseline"
        over = f" {self.slo_ms:g} ms" if self.slo_ms is not None else ""
        return f"{self.metric}{over} {limit}"


def _example(metric: str) -> tuple[str, ...]:
    return ("worse_than_baseline: 10%",) if metric in MEANS else ("max: 0.01",)


GUARDS = (
    Guard(metric="error_rate", max=0.01, alpha=0.005),
    Guard(metric="refused_rate", worse_than_baseline=1.0),
    Guard(metric="itl_mean", worse_than_baseline=0.1),
    Guard(metric="empty_rate", max=0.02),
    Guard(metric="repeat_rate", max=0.05),
)


class ReleaseSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A release of the pool `canary` in place of `stable`, for requests that name `model`.

    stable: "" for the pool that serves the model when it begins. baseline: a pool of the old
    version, of the canary's size, which it is compared with. alpha: how likely a sound version may
    be rolled back, all guards together. warmup: for which latencies do not count, as caches are
    cold. min_events: of the canary, before a step may end. max_hold: how long a step may go on
    undecided. shadow: part of the old version's answers that the canary is shown, for a guard
    shadow_kl.
    """

    model: str
    canary: str
    stable: str = ""
    baseline: str | None = None
    steps: tuple[ReleaseStep | float | str, ...] = STEPS
    guards: tuple[Guard, ...] = GUARDS
    alpha: Small = 0.01
    hold: Seconds = "5m"
    max_hold: Seconds = "1h"
    warmup: Seconds = "90s"
    min_events: Annotated[int, Meta(ge=0, le=10**9)] = 100
    on_inconclusive: Literal["pause", "rollback"] = "pause"
    shadow: str | float = 0

    @property
    def plan(self) -> tuple[tuple[float, float], ...]:
        """Each step's share and the seconds it holds."""
        steps = [s if isinstance(s, ReleaseStep) else ReleaseStep(s) for s in self.steps]
        hold = self.hold
        return tuple((s.share, seconds(hold if s.hold is None else s.hold, "hold")) for s in steps)

    @property
    def warm(self) -> float:
        return seconds(self.warmup, "warmup")

    @property
    def shadowed(self) -> float:
        return part(self.shadow, "shadow")

    @property
    def patience(self) -> float:
        return seconds(self.max_hold, "max_hold")

    @property
    def alphas(self) -> tuple[float, ...]:
        """Of each guard; those that name none share what is left."""
        named = sum(g.alpha for g in self.guards if g.alpha is not None)
        others = sum(g.alpha is None for g in self.guards)
        left = (self.alpha - named) / max(1, others)
        return tuple(left if g.alpha is None else g.alpha for g in self.guards)

    def check(self) -> ReleaseSpec:
        """Itself. Raises UsageError for what cannot be run."""
        named = {"stable": self.stable, "canary": self.canary, "baseline": self.baseline}
        pools = {name: pool for name, pool in named.items() if pool}
        if not self.model or not self.canary or len({*pools.values()}) < len(pools):
            given = ", ".join(f"{name} {pool!r}" for name, pool in pools.items()) or "none"
            raise UsageError(f"a release needs a model and different pools, not {given}")
        shares = [share for share, _ in self.plan]
        if not shares or shares != sorted(set(shares)) or not 0 < shares[0] <= shares[-1] == 1:
            raise UsageError("steps grow from above 0 up to 100 %", "steps: [5, 10, 25, 50, 100]")
        if not self.guards:
            raise UsageError("a release needs guards", "guards: [{metric: error_rate, max: 0.01}]")
        for guard in self.guards:
            guard.check()
        if min(self.alphas) <= 0 or sum(self.alphas) > self.alpha * (1 + 1e-9):
            raise UsageError(
                f"the guards' alphas are more than the release's {self.alpha:g} together",
                f"alpha: {sum(g.alpha or self.alpha / 10 for g in self.guards):.3g}",
            )
        if not 0 <= self.shadowed <= 1:
            raise UsageError(f"shadow: {self.shadow!r} is no part of all answers", "shadow: 2%")
        if self.shadowed and not any(g.metric == "shadow_kl" for g in self.guards):
            raise UsageError(
                "shadow needs a guard that tells from when on versions differ too much",
                "guards: [{metric: shadow_kl, max: 0.03}]",
            )
        _ = self.warm, self.patience
        return self


def convert(value: Any) -> ReleaseSpec:
    """The same from what was decoded. Raises UsageError."""
    try:
        return msgspec.convert(value, ReleaseSpec, strict=True).check()
    except msgspec.ValidationError as e:
        raise UsageError(f"the release: {e}") from None
