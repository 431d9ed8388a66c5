"""The routes of Ollama's API."""

from __future__ import annotations

from octavo.server.dialect import (
    Dialect,
    EmbedRoute,
    FixedRoute,
    GenerateRoute,
    ModelsRoute,
    TextRoute,
)
from octavo.server.dialects.ollama import models, requests, responses, schemas

DIALECT = Dialect(
    schemas.FIELDS,
    responses.error_body,
    (
        GenerateRoute(
            "/api/chat", schemas.ChatBody, requests.chat_request, responses.LineWriter,
            names=requests.names, nothing=responses.nothing,
        ),
        GenerateRoute(
            "/api/generate", schemas.GenerateBody, requests.generate_request,
            responses.LineWriter, names=requests.names, nothing=responses.nothing,
        ),
        EmbedRoute(
            "/api/embed", schemas.EmbedBody, requests.embed_inputs, responses.embed_reply,
            names=lambda _: {"inputs": "input", "prompt": "input"},
        ),
        EmbedRoute(
            "/api/embeddings", schemas.EmbeddingsBody, lambda body: [body.prompt],
            responses.embeddings_reply, names=lambda _: {"inputs": "prompt"},
        ),
        TextRoute("/api/show", schemas.ShowBody, models.show),
        ModelsRoute("/api/tags", models.tags),
        ModelsRoute("/api/ps", models.running),
        FixedRoute("/api/version", models.version_reply),
        FixedRoute("/", models.root, "text/plain; charset=utf-8"),
    ),
    requests.plain_name,
    "ollama",
    responses.ERROR_SCHEMA,
)  # fmt: skip
