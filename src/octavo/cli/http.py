"""Requests of commands to a server that runs."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any


class HttpRefusal(Exception):
    """A server answered with an error. message: what it says to it, if it does."""

    def __init__(self, status: int, message: str | None) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class NoAnswer(Exception):
    """Nothing answers at the address, and why."""


def send(url: str, key: str | None, data: bytes | None, seconds: float | None) -> bytes:
    """What a server answers, asked without a proxy; data is posted. Raises both of the above."""
    headers = {"content-type": "application/json"} | (
        {"authorization": f"Bearer {key}"} if key else {}
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(url, data, headers)
        with direct.open(request, timeout=seconds) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as e:
        raise HttpRefusal(e.code, _message(e.read())) from None
    except (OSError, ValueError, HTTPException) as e:
        raise NoAnswer(getattr(e, "reason", e)) from None


def _message(body: bytes) -> str | None:
    try:
        found: Any = json.loads(body)["error"]["message"]
        return str(found)
    except (ValueError, LookupError, TypeError):
        return None
