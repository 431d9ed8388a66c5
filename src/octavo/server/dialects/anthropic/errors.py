"""Errors as Anthropic's API writes them."""

from __future__ import annotations

import msgspec

from octavo.errors import RequestError

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
        },
    },
    "required": ["type", "error"],
}


def error_body(error: RequestError) -> bytes:
    """The JSON of an error response."""
    kind = "invalid_request_error" if error.status < 500 else "api_error"
    entry = {"type": KINDS.get(error.status, kind), "message": str(error)}
    return msgspec.json.encode({"type": "error", "error": entry})
