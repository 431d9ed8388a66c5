"""Errors as llama.cpp's server writes them."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.errors import ContextExceeded, RequestError

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    503: "unavailable_error",
}
SCHEMA = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "code": {"type": "integer"}, "message": {"type": "string"},
                "type": {"type": "string"}, "n_prompt_tokens": {"type": "integer"},
                "n_ctx": {"type": "integer"},
            },
            "required": ["code", "message", "type"],
        }
    },
    "required": ["error"],
}  # fmt: skip


def error_object(error: RequestError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    entry = {"code": error.status, "message": str(error)}
    if isinstance(error, ContextExceeded):
        more = {"n_prompt_tokens": error.prompt, "n_ctx": error.context}
        return {"error": entry | {"type": "exceed_context_size_error"} | more}
    return {"error": entry | {"type": KINDS.get(error.status, kind)}}


def error_body(error: RequestError) -> bytes:
    """The JSON of an error response."""
    return msgspec.json.encode(error_object(error))
