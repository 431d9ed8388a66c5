"""The routes of OpenAI's API."""

from __future__ import annotations

from octavo.server.dialect import (
    Dialect,
    EmbedRoute,
    GenerateRoute,
    ModelsRoute,
    ScoreRoute,
    StoredRoute,
    TextRoute,
)
from octavo.server.dialects.openai import embeddings, items, items_writer, replies, requests
from octavo.server.dialects.openai.errors import SCHEMA, error_body
from octavo.server.dialects.openai.models import model_card, model_list
from octavo.server.dialects.openai.responses import ResponseWriter, error_event
from octavo.server.dialects.openai.schemas import (
    FIELDS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from octavo.server.dialects.openai.tokens import detokenize, tokenize

DIALECT = Dialect(
    FIELDS,
    error_body,
    (
        GenerateRoute(
            "/v1/chat/completions", ChatBody, requests.chat_request, ResponseWriter,
            names=requests.names, answer=replies.ChatCompletion,
        ),
        GenerateRoute(
            "/v1/completions", CompletionBody, requests.completion_request, ResponseWriter,
            names=requests.names, answer=replies.Completion,
        ),
        EmbedRoute(
            "/v1/embeddings", embeddings.EmbeddingBody, embeddings.inputs,
            embeddings.embeddings_reply, names=lambda _: {"inputs": "input", "prompt": "input"},
            answer=replies.Embeddings,
        ),
        ScoreRoute(
            "/v1/rerank", embeddings.RerankBody, embeddings.rerank_pairs,
            embeddings.rerank_reply, names=lambda _: {"pairs": "documents", "prompt": "documents"},
            answer=replies.Ranking,
        ),
        ScoreRoute(
            "/v1/score", embeddings.ScoreBody, embeddings.score_pairs, embeddings.score_reply,
            names=lambda _: {"pairs": "text_1", "prompt": "text_1"}, answer=replies.Scores,
        ),
        TextRoute("/tokenize", TokenizeBody, tokenize, names=requests.names, answer=replies.Tokens),
        TextRoute("/detokenize", DetokenizeBody, detokenize, answer=replies.Text),
        ModelsRoute("/v1/models", model_list, replies.Models),
        ModelsRoute("/v1/models/{name:path}", model_card, replies.Model),
    ),
    name="openai",
    error_schema=SCHEMA,
    error_event=error_event,
)  # fmt: skip

RESPONSES = Dialect(
    items.FIELDS,
    error_body,
    (
        StoredRoute(
            "/v1/responses", items.ResponsesBody, "resp_", items.responses_request,
            items_writer.ItemsWriter, items_writer.input_items, items_writer.response_object,
            items_writer.failed, names=items.names, answer=replies.Response,
        ),
    ),
    name="openai",
    error_schema=SCHEMA,
)  # fmt: skip
