"""Errors as OpenAI's API writes them."""

from __future__ import annotations

import msgspec

from octavo.errors import RequestError

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "service_unavailable",
}
SCHEMA = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"}, "type": {"type": "string"},
                "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}  # fmt: skip


def error_body(error: RequestError) -> bytes:
    """The JSON of an error response."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    kind = KINDS.get(error.status, kind)
    entry = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": entry})
