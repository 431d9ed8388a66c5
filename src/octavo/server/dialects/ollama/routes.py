"""The routes of Ollama's API."""

from __future__ import annotations

from octavo.server.dialect import (
    Dialect,
    EmbedRoute,
    FetchRoute,
    FixedRoute,
    GenerateRoute,
    ModelsRoute,
    RefusedRoute,
    TextRoute,
)
from octavo.server.dialects.ollama import models, replies, requests, responses, schemas

DIALECT = Dialect(
    schemas.FIELDS,
    responses.error_body,
    (
        GenerateRoute(
            "/api/chat", schemas.ChatBody, requests.chat_request, responses.LineWriter,
            names=requests.names, nothing=responses.nothing, answer=replies.Chat,
        ),
        GenerateRoute(
            "/api/generate", schemas.GenerateBody, requests.generate_request,
            responses.LineWriter, names=requests.names, nothing=responses.nothing,
            answer=replies.Generated,
        ),
        EmbedRoute(
            "/api/embed", schemas.EmbedBody, requests.embed_inputs, responses.embed_reply,
            names=lambda _: {"inputs": "input", "prompt": "input"}, answer=replies.Embeddings,
        ),
        EmbedRoute(
            "/api/embeddings", schemas.EmbeddingsBody,
            lambda body: [body.prompt] if body.prompt else [], responses.embeddings_reply,
            names=lambda _: {"inputs": "prompt"}, answer=replies.Embedding,
        ),
        TextRoute("/api/show", schemas.ShowBody, models.show, answer=replies.Shown),
        FetchRoute(
            "/api/pull", schemas.PullBody, lambda body: body.model,
            lambda body: body.stream is not False, responses.pull_line,
            answer=replies.PullProgress,
        ),
        RefusedRoute("/api/delete", "DELETE", "models are deleted with: octavo rm MODEL"),
        RefusedRoute("/api/copy", "POST", "names are given with: octavo serve --alias NAME=MODEL"),
        RefusedRoute("/api/create", "POST", "models are made with: octavo quantize, octavo merge"),
        RefusedRoute("/api/push", "POST", "models are not uploaded from here"),
        ModelsRoute("/api/tags", models.tags, replies.Tags),
        ModelsRoute("/api/ps", models.running, replies.Running),
        FixedRoute("/api/version", models.version_reply, replies.Version),
        FixedRoute("/", models.root, str, "text/plain; charset=utf-8"),
    ),
    requests.plain_name,
    "ollama",
    responses.ERROR_SCHEMA,
)  # fmt: skip
