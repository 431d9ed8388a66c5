"""Checks what Python callers give, as names and types are checked in bodies over HTTP."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from octavo.errors import InvalidValue

T = TypeVar("T")
_FIELD = re.compile(r"(.*?) - at .*?\$\.(\w+).*", re.DOTALL)


def check_names(given: Mapping[str, Any], kind: type) -> None:
    """Raises TypeError, as a signature would, for an option that a TypedDict does not have."""
    for name in given:
        if name not in kind.__annotations__:
            known = ", ".join(kind.__annotations__)
            raise TypeError(f"unexpected keyword argument {name!r}; the options are {known}")


def typed(given: Mapping[str, Any], kind: type[T]) -> T:
    """A struct or TypedDict of fields by name. Raises InvalidValue for a value of another type."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as e:
        what, field = _FIELD.fullmatch(str(e)).groups()  # type: ignore[union-attr]
        raise InvalidValue(f"{field}: {what}", field) from None
