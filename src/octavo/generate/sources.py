"""The bytes of pictures and videos: from data: URLs, allowed hosts, and files (in Python)."""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path
from typing import Any

from octavo.errors import InvalidValue, RequestError
from octavo.generate.fetch import MAX_BYTES, Fetcher

_DATA_URL = re.compile(
    r"data:(image|video)/[\w.+-]{1,64}(;[\w.+-]{1,32}=[\w.+-]{1,64})*;base64",
    re.IGNORECASE | re.ASCII,
)


def is_remote(source: Any) -> bool:
    """Whether it is a URL of a file that would have to be fetched."""
    return isinstance(source, str) and source[:4].lower() == "http"


def load_source(source: Any, fetcher: Fetcher, at: str, kind: str = "image") -> Any:
    """What a URL or a path names, as bytes; else the source itself. kind: of what it is. Raises
    RequestError naming `at`."""
    if isinstance(source, Path):
        return _file(source, at)
    if not isinstance(source, str):
        return source
    if source[:5].lower() == "data:":
        media_type, payload = split_data_url(source, at, kind)
        return decoded(payload, at)
    if not is_remote(source):
        raise RequestError(
            f"{at} is no URL of {kind} files; data:{kind}/...;base64,... is taken", at,
            "invalid_value",
        )  # fmt: skip
    return fetcher.fetch(source, at)


def split_data_url(url: str, at: str, kind: str) -> tuple[str, str]:
    """The media type, in small letters, and the base64 text. Raises InvalidValue."""
    comma = url.find(",", 0, 512)
    head = _DATA_URL.fullmatch(url, 0, comma) if comma > 0 else None
    if head is None or (kind == "image" and head[1].lower() != kind):
        raise InvalidValue(f"{at} is not data:{kind}/...;base64,...", at)
    return url[5:comma].partition(";")[0].lower(), url[comma + 1 :]


def decoded(text: str, at: str) -> bytes:
    """Raises InvalidValue for what is not base64."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidValue(f"{at} is not valid base64", at) from None


def _file(path: Path, at: str) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as e:
        raise InvalidValue(f"{at}: {path}: {e.strerror}", at) from None
    if len(data) > MAX_BYTES:
        raise InvalidValue(f"{at} has over {MAX_BYTES:,} bytes", at)
    return data
