"""The routes of llama.cpp's API; its `/tokenize` and `/detokenize` are OpenAI's dialect's."""

from __future__ import annotations

from octavo.server.dialect import Dialect, GenerateRoute, ModelRoute, RefusedRoute, TextRoute
from octavo.server.dialects.llama_cpp import errors, models, replies, requests, schemas
from octavo.server.dialects.llama_cpp.responses import CompletionWriter
from octavo.server.dialects.openai.requests import names
from octavo.server.dialects.openai.schemas import ConversationBody

DIALECT = Dialect(
    schemas.FIELDS,
    errors.error_body,
    (
        GenerateRoute(
            "/completion", schemas.CompletionBody, requests.completion_request, CompletionWriter,
            names=requests.names, answer=replies.Completion | list[replies.Completion],
        ),
        GenerateRoute(
            "/infill", schemas.InfillBody, requests.infill_request, CompletionWriter,
            names=requests.names, answer=replies.Completion | list[replies.Completion],
        ),
        TextRoute(
            "/apply-template", ConversationBody, models.apply_template, names=names,
            answer=replies.Prompt,
        ),
        ModelRoute("/props", models.props, replies.Properties),
        ModelRoute("/slots", models.slots, list[replies.Slot]),
        RefusedRoute("/props", "POST", "properties are set when the server is started"),
    ),
    name="llama_cpp",
    error_schema=errors.SCHEMA,
)  # fmt: skip
