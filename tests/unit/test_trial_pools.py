"""What is known of upstreams, and what not yet, when a release asks for them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from octavo.errors import InvalidValue
from octavo.gateway.errors import UnknownModel
from octavo.gateway.trial_pools import check_canary, check_release
from octavo.gateway.upstream import ANY, ModelFigures, Place
from octavo.gateway.upstreams import Upstreams
from octavo.release.machine import NotNow
from octavo.release.spec import ReleaseSpec

SPEC = ReleaseSpec(model="m", stable="default", canary="next")


def test_who_has_not_been_asked_yet_may_serve_anything() -> None:
    upstreams = Upstreams()
    old, new, newer = (
        upstreams.add(Place(f"http://{at}", pool))
        for at, pool in (("a:1", "default"), ("b:1", "next"), ("b:2", "next"))
    )
    check_release(upstreams, SPEC)
    upstreams.up(old, {"m": ModelFigures()}, own=True)
    upstreams.up(new, {"other": ModelFigures()}, own=True)
    check_release(upstreams, SPEC)  # the newer one may serve it
    upstreams.down(newer, "b:2 is away")
    with pytest.raises(UnknownModel, match="pool 'next' serves 'm'; known models: other"):
        check_release(upstreams, SPEC)
    upstreams.up(new, {"m": ModelFigures()}, own=True)
    check_release(upstreams, SPEC)
    upstreams.down(old, "a:1 is away")
    check_release(upstreams, SPEC)  # the old version may have ended
    upstreams.drain(new)
    with pytest.raises(NotNow, match="^no upstream of pool 'next' answers: b:2 is away$"):
        check_canary(upstreams, SPEC)


@pytest.mark.parametrize("role", ["stable", "canary", "baseline"])
def test_a_pool_of_nobody_is_named_with_what_asks_for_it(role: str) -> None:
    upstreams = Upstreams()
    for pool in ("default", "next"):
        upstreams.add(Place(f"http://{pool}:1", pool))
    with pytest.raises(InvalidValue, match="^no upstream is in the pool 'x'; pools: ") as refused:
        check_release(upstreams, replace(SPEC, **{role: "x"}))
    assert refused.value.param == role


def test_who_tells_nobody_what_it_serves_may_be_asked_for_anything() -> None:
    """An upstream that wants a client's key for its list of models."""
    upstreams = Upstreams()
    for at, pool in (("a:1", "default"), ("b:1", "next")):
        upstreams.up(upstreams.add(Place(f"http://{at}", pool)), {ANY: ModelFigures()}, own=False)
    check_release(upstreams, SPEC)
