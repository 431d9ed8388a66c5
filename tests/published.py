"""What OpenAI, Anthropic and Ollama say their replies are, as their Python clients state it.

Every successful reply that a test gets from a server is checked, strictly: nothing is converted,
nothing that is required may be missing. The clients themselves look at nothing of that.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter


def _types() -> dict[str, tuple[Any, Any]]:
    """By path: what a whole reply is, and what a piece of a stream is."""
    import anthropic.types as theirs
    import ollama
    from openai.types import Completion, CompletionChoice, CreateEmbeddingResponse, Embedding, Model
    from openai.types.chat import ChatCompletion, ChatCompletionChunk
    from openai.types.completion_choice import Logprobs
    from openai.types.responses import Response, ResponseStreamEvent

    class Models(BaseModel):
        object: Literal["list"]
        data: list[Model]

    class Vector(Embedding):
        embedding: list[float] | str  # type: ignore[assignment]  # base64 is not in their types

    class Vectors(CreateEmbeddingResponse):
        data: list[Vector]  # type: ignore[assignment]

    class UnfinishedChoice(CompletionChoice):
        """A piece of a choice, which has not ended."""

        finish_reason: Literal["stop", "length", "content_filter"] | None  # type: ignore[assignment]

    class EchoLogprobs(Logprobs):
        """Of a text with its prompt, whose first token has none."""

        token_logprobs: list[float | None] | None = None  # type: ignore[assignment]
        top_logprobs: list[dict[str, float] | None] | None = None  # type: ignore[assignment]

    class Choice(CompletionChoice):
        logprobs: EchoLogprobs | None = None

    class Text(Completion):
        choices: list[Choice]  # type: ignore[assignment]

    class Piece(Completion):
        choices: list[UnfinishedChoice]  # type: ignore[assignment]

    return {
        "/chat/completions": (ChatCompletion, ChatCompletionChunk),
        "/completions": (Text, Piece),
        "/embeddings": (Vectors, None),
        "/models": (Models, None),
        "/responses": (Response, ResponseStreamEvent),
        "/messages": (theirs.Message, theirs.RawMessageStreamEvent),
        "/messages/count_tokens": (theirs.MessageTokensCount, None),
        "/api/chat": (ollama.ChatResponse, ollama.ChatResponse),
        "/api/generate": (ollama.GenerateResponse, ollama.GenerateResponse),
        "/api/embed": (ollama.EmbedResponse, None),
        "/api/embeddings": (ollama.EmbeddingsResponse, None),
        "/api/tags": (ollama.ListResponse, None),
        "/api/show": (ollama.ShowResponse, None),
        "/api/ps": (ollama.ProcessResponse, None),
        "/api/pull": (ollama.ProgressResponse, ollama.ProgressResponse),
    }


@cache
def _adapters() -> dict[str, list[TypeAdapter[Any] | None]]:
    return {
        path: [None if kind is None else TypeAdapter(kind) for kind in kinds]
        for path, kinds in _types().items()
    }


# Replies to these may be a user's message, which there is only here.
EXTENSIONS = (b'"add_generation_prompt": false', b'"continue_final_message": true')


def check(path: str, status: int, text: str, asked: bytes = b"") -> None:
    """Raises ValidationError for a reply that is not as published. Other paths have no schema."""
    path = path.partition("?")[0].removeprefix("/v1")
    if status != 200 or path not in _adapters() or any(e in asked for e in EXTENSIONS):
        return
    whole, piece = _adapters()[path]
    pieces = _pieces(path, text)
    if pieces is None:
        assert whole is not None
        whole.validate_json(text, strict=True)
        return
    for one in pieces:
        if "error" not in one:
            assert piece is not None
            piece.validate_json(json.dumps(one), strict=True)


def _pieces(path: str, text: str) -> list[Any] | None:
    """The objects of a stream, None for a whole reply."""
    if path.startswith("/api/"):
        lines = [line for line in text.split("\n") if line]
        return [json.loads(line) for line in lines] if len(lines) > 1 else None
    if text.startswith("{"):
        return None
    data = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"]
