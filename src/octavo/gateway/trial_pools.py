"""Whether upstreams can answer what a release or an experiment will ask of them."""

from __future__ import annotations

from octavo.errors import InvalidValue
from octavo.experiments.spec import ExperimentSpec
from octavo.gateway.errors import UnknownModel
from octavo.gateway.upstream import Upstream
from octavo.gateway.upstreams import Upstreams
from octavo.release.machine import NotNow
from octavo.release.spec import ReleaseSpec


def check_release(upstreams: Upstreams, spec: ReleaseSpec) -> None:
    """Raises RequestError if a pool has nobody or another model, or the canary does not answer."""
    pools = sorted({one.place.pool for one in upstreams})
    named = {"stable": spec.stable, "canary": spec.canary, "baseline": spec.baseline}
    for role, name in named.items():
        if name is None:
            continue
        if name not in pools:
            known = ", ".join(pools) or "none"
            raise InvalidValue(f"no upstream is in the pool {name[:64]!r}; pools: {known}", role)
        _check_model(spec.model, _in(upstreams, name), name)
    check_canary(upstreams, spec)


def check_canary(upstreams: Upstreams, spec: ReleaseSpec) -> None:
    """Raises NotNow if nobody with the new version answers, or may do so in a moment."""
    found = _in(upstreams, spec.canary)
    if not any(up.state in ("up", "starting") for up in found):
        why = next((f": {up.reason}" for up in found if up.reason), "")
        raise NotNow(f"no upstream of pool {spec.canary[:64]!r} answers{why}", "canary")


def check_experiment(upstreams: Upstreams, spec: ExperimentSpec) -> None:
    """Raises UnknownModel if a variant is answered by a model that nobody serves."""
    for variant in spec.variants.values():
        _check_model(variant.model or spec.model, list(upstreams))


def _in(upstreams: Upstreams, pool: str) -> list[Upstream]:
    return [up for up in upstreams if up.place.pool == pool]


def _check_model(model: str, upstreams: list[Upstream], pool: str = "") -> None:
    """Raises UnknownModel if these have said what they serve, and this is none of it. pool: which
    they are all of."""
    states = {up.state for up in upstreams}
    if any(up.serves(model) for up in upstreams) or "up" not in states or "starting" in states:
        return
    raise UnknownModel(model, sorted({name for up in upstreams for name in up.models}), pool)
