"""Lists in pages: `limit`, `order` and `after`, as OpenAI's clients ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import InvalidValue

MOST = 100  # objects a page, of most lists


def asked(most: int = MOST, **more: Any) -> dict[str, Any]:
    """JSON Schemas of what a query may have."""
    limit = {"type": "integer", "minimum": 1, "maximum": most}
    return {"limit": limit, "order": {"enum": ["asc", "desc"]}, "after": {"type": "string"}} | more


def page(
    latest_first: list[dict[str, Any]], query: Mapping[str, str], limit: int = 20, most: int = MOST
) -> dict[str, Any]:
    """The part of a list that a query asks for.

    limit: the number of objects unless the query names one, which is at most `most`.
    Raises InvalidValue.
    """
    wanted = query.get("limit", str(limit))
    if not wanted.isdecimal() or len(wanted) > 9 or not 1 <= int(wanted) <= most:
        raise InvalidValue(f"limit is a number from 1 to {most:,}", "limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidValue("order is asc or desc", "order")
    rest = latest_first if order == "desc" else latest_first[::-1]
    ids = [each["id"] for each in rest]
    if (after := query.get("after")) is not None:
        if after not in ids:
            raise InvalidValue("after is the id of nothing that is listed", "after")
        rest = rest[ids.index(after) + 1 :]
    shown = rest[: int(wanted)]
    return {
        "object": "list", "data": shown, "has_more": len(shown) < len(rest),
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
    }  # fmt: skip
