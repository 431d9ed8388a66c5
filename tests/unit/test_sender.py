"""Whom engines compute for: a key, and those who send with it."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from octavo.server.guard import Principal
from octavo.server.sender import ComputedFor, computed_for


def of(key: Principal, named: str = "") -> ComputedFor:
    headers = [(b"x-sender", named.encode("latin-1"))] if named else []
    return computed_for(Request({"type": "http", "headers": headers, "principal": key}))


@pytest.mark.parametrize("admin", [False, True])
def test_senders_of_one_key_share_nothing_that_is_cached(admin: bool) -> None:
    one, other = Principal("one", admin), Principal("other", admin)
    salts = [of(key, named).salt for key in (one, other) for named in ("", "a", "b", "ä" * 60_000)]
    assert len(set(salts)) == 8 and max(map(len, salts)) == 32
    assert of(one, "a") == of(one, "a") and of(one) == ("one", "one")


def test_only_an_admins_senders_have_shares_of_the_work() -> None:
    """With a header of its own for each request another key would get more than its share."""
    key, admin = Principal("one"), Principal("one", admin=True)
    assert {of(key, named).tenant for named in ("", "a", "b")} == {"one"}
    assert len({of(admin, named).tenant for named in ("", "a", "b")}) == 3
