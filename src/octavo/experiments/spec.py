"""What an experiment compares, as it is written in YAML or JSON, checked."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from octavo.errors import UsageError
from octavo.release.assignment import BUCKETS, whole_buckets
from octavo.release.events import COVARIATES, VALUES

Unit = Literal["header", "user", "session", "key", "request"]
NEVER = ("messages", "prompt", "input", "model", "stream", "tools", "user")  # set by no variant
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]  # headers have them


class Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """weight: its share of the requests, in percent. model: that answers in place of the one that
    was asked for. set: fields of the body. prompt_prefix: put before the prompt's first text."""

    weight: Annotated[float, Meta(ge=0, le=100)]
    model: str | None = None
    set: dict[str, Any] = {}
    prompt_prefix: str | None = None


class ExperimentSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An experiment on requests for `model`. control: the variant that others are compared with.

    unit: what is assigned, the first of these that a request has. metrics: of events, or names that
    clients give feedback by; the first decides. cuped: covariates. alpha: how likely the first
    metric shows a difference that there is not, however often one looks. horizon: units at which
    intervals shall be narrowest.
    """

    id: Name
    model: str
    variants: dict[Name, Variant]
    control: str
    unit: tuple[Unit, ...] = ("header", "user", "session", "request")
    metrics: tuple[str, ...] = ("ttft", "itl", "error_rate")
    cuped: tuple[str, ...] = ("prompt_tokens",)
    alpha: Annotated[float, Meta(gt=0, lt=1)] = 0.05
    horizon: Annotated[int, Meta(ge=10, le=10**9)] = 5000

    @property
    def shares(self) -> dict[str, float]:
        return {name: variant.weight / 100 for name, variant in self.variants.items()}

    @property
    def feedback(self) -> tuple[str, ...]:
        """Metrics that clients tell."""
        return tuple(name for name in self.metrics if name not in VALUES)

    def check(self) -> ExperimentSpec:
        """Itself. Raises UsageError."""
        if len(self.variants) < 2 or self.control not in self.variants:
            raise UsageError("an experiment has two or more variants, one of them its control")
        if not min(whole_buckets(self.shares).values()):
            raise UsageError(f"every variant needs a weight of {100 / BUCKETS:g} or more")
        if not self.metrics or len(set(self.metrics)) < len(self.metrics) or not self.unit:
            raise UsageError("an experiment needs different metrics and a unit", "metrics: [ttft]")
        if unknown := set(self.cuped) - set(COVARIATES):
            raise UsageError(f"cuped knows {', '.join(COVARIATES)}, not {min(unknown)!r}")
        for name, variant in self.variants.items():
            if wrong := [field for field in NEVER if field in variant.set]:
                raise UsageError(f"variant {name!r} cannot set {wrong[0]!r}")
        return self


def convert(value: Any) -> ExperimentSpec:
    """An experiment from what was decoded. Raises UsageError."""
    try:
        return msgspec.convert(value, ExperimentSpec, strict=True).check()
    except msgspec.ValidationError as e:
        raise UsageError(f"the experiment: {e}") from None
