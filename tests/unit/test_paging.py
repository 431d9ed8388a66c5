"""Lists in pages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import InvalidValue
from octavo.server.paging import page


@given(st.integers(0, 30), st.integers(1, 12), st.sampled_from(["asc", "desc"]))
def test_pages_after_each_other_are_the_list(count: int, limit: int, order: str) -> None:
    latest_first = [{"id": f"b{i}"} for i in reversed(range(count))]
    query = {"limit": str(limit), "order": order}
    walked = []
    while True:
        made = page(latest_first, query)
        walked += made["data"]
        assert len(made["data"]) <= limit
        assert [made["first_id"], made["last_id"]] == (
            [made["data"][i]["id"] for i in (0, -1)] if made["data"] else [None, None]
        )
        if not made["has_more"]:
            break
        query["after"] = made["last_id"]
    assert walked == (latest_first if order == "desc" else latest_first[::-1])


@pytest.mark.parametrize(
    "query",
    [{"limit": "0"}, {"limit": "101"}, {"limit": "-1"}, {"limit": "1e1"}, {"limit": ""},
     {"limit": "9" * 5000}, {"order": "up"}, {"after": "nobody"}],
)  # fmt: skip
def test_what_is_no_page(query: dict[str, str]) -> None:
    with pytest.raises(InvalidValue) as caught:
        page([{"id": "a"}], query)
    assert caught.value.param == next(iter(query))
