"""Decodes and validates JSON bodies: unknown names and oversized fields are refused first."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, TypeVar, get_type_hints

import msgspec
from msgspec import Raw

from octavo.errors import InvalidValue, RequestError
from octavo.server.sizes import SMALL, SizeBounds

Body = TypeVar("Body", bound=msgspec.Struct)
# what msgspec raises for what it cannot read
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
FindBounds = Callable[[str | None], SizeBounds]
_AT = " - at `$"  # before the path of the field at fault, in what msgspec says
_FIELD = re.compile(r"Object (contains unknown|missing required) field `(.*)`$", re.DOTALL)


@dataclass(frozen=True)
class Fields:
    """Fields that any body of a dialect may have besides its own.

    ignored: have no effect here. unsupported: refused, unless they have one of the values, which
    ask for nothing.
    """

    ignored: frozenset[str] = frozenset()
    unsupported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @cached_property
    def names(self) -> frozenset[str]:
        return self.ignored.union(self.unsupported)


def _unsupported(name: str) -> RequestError:
    return RequestError(f"{name} is not supported here", name, "unsupported_parameter")


def _refusal(error: msgspec.ValidationError) -> RequestError:
    """What msgspec found, under the whole path of the field at fault."""
    text = str(error)
    what, at, rest = text.rpartition(_AT) if _AT in text else (text, "", "")
    path = rest.removesuffix("`").removeprefix(".")[:200] if at else None
    if found := _FIELD.match(what):
        kind, name = found[1], found[2][:64]
        whole = f"{path}.{name}" if path else name
        return (
            _unsupported(whole)
            if kind == "contains unknown"
            else InvalidValue(f"{whole} is missing", whole)
        )
    return InvalidValue(f"{path}: {what[:200]}" if path else what[:200], path)


@cache
def _outline(kind: type[msgspec.Struct], more: frozenset[str]) -> type[msgspec.Struct]:
    """A struct that holds each field of a body, and each of `more`, as undecoded JSON."""
    names = {*kind.__struct_fields__, *more}
    fields = [(name, Raw, Raw()) for name in sorted(names)]
    return msgspec.defstruct(kind.__name__, fields, forbid_unknown_fields=True)


@cache
def _rules(kind: type[msgspec.Struct]) -> dict[str, list[Any]]:
    """The limits that each field is annotated with."""
    hints = get_type_hints(kind, include_extras=True)
    rules = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: [r for r in found if hasattr(r, "check")] for name, found in rules.items()}


def _check_outline(
    data: bytes, kind: type[msgspec.Struct], fields: Fields, find: FindBounds
) -> None:
    """Refuses unknown names and fields that are too large, before contents are decoded."""
    outline = msgspec.json.decode(data, type=_outline(kind, fields.names))
    for name, accepted in fields.unsupported.items():
        text = b"" if name in kind.__struct_fields__ else bytes(getattr(outline, name))
        if text not in (b"", b"null") and not _is_one_of(text, accepted):
            raise _unsupported(name)
    if len(data) > SMALL:
        bounds = find(_model(bytes(getattr(outline, "model", b""))))
        for name, rules in _rules(kind).items():
            for rule in rules:
                rule.check(bytes(getattr(outline, name)), name, bounds)


def _model(text: bytes) -> str | None:
    try:
        return msgspec.json.decode(text or b"null", type=str | None)
    except msgspec.ValidationError as e:
        raise InvalidValue(f"model: {e}", "model") from None


def _is_one_of(text: bytes, values: tuple[Any, ...]) -> bool:
    if len(text) > 64:
        return False
    try:
        given = msgspec.json.decode(text)
    except msgspec.ValidationError:  # a number beyond all
        return False
    # In Python false is 0, and true is 1; in JSON they are not.
    return any(v == given and isinstance(v, bool) == isinstance(given, bool) for v in values)


def parse(data: bytes, kind: type[Body], fields: Fields, find: FindBounds) -> Body:
    """A validated body. Raises RequestError naming the field at fault, by its whole path.

    find: the bounds of the model that the body names. It may raise RequestError.
    """
    try:
        _check_outline(data, kind, fields, find)
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as e:
        if not data.lstrip().startswith(b"{"):
            raise InvalidValue("the body must be a JSON object", None) from None
        raise _refusal(e) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidValue("the body is not valid JSON in UTF-8", None) from None
    except RecursionError:
        raise InvalidValue("the body nests too deeply", None) from None
