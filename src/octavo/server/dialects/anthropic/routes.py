"""The routes of Anthropic's API."""

from __future__ import annotations

from octavo.server.dialect import Dialect, GenerateRoute, TextRoute
from octavo.server.dialects.anthropic import replies
from octavo.server.dialects.anthropic.errors import SCHEMA, error_body
from octavo.server.dialects.anthropic.requests import messages_request, names
from octavo.server.dialects.anthropic.responses import MessageWriter, count_tokens
from octavo.server.dialects.anthropic.schemas import FIELDS, CountBody, MessagesBody

DIALECT = Dialect(
    FIELDS,
    error_body,
    (
        GenerateRoute(
            "/v1/messages",
            MessagesBody,
            messages_request,
            MessageWriter,
            names=names,
            answer=replies.Message,
        ),
        TextRoute(
            "/v1/messages/count_tokens", CountBody, count_tokens, names=names, answer=replies.Count
        ),
    ),
    name="anthropic",
    error_schema=SCHEMA,
)
