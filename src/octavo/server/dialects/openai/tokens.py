"""Responses of /tokenize and /detokenize."""

from __future__ import annotations

from octavo.errors import InvalidValue
from octavo.generate.model import ServedModel
from octavo.generate.prepare import encode_chat
from octavo.server.dialects.openai.requests import tokenize_request
from octavo.server.dialects.openai.responses import encode
from octavo.server.dialects.openai.schemas import DetokenizeBody, TokenizeBody


def tokenize(body: TokenizeBody, served: ServedModel) -> bytes:
    """Ids of a text, or of a conversation as a chat would begin. Raises RequestError."""
    text = body.prompt if body.prompt is not None else body.content
    if (text is None) == (body.messages is None):
        raise InvalidValue("give either prompt or messages", "prompt")
    if text is not None:
        ids = served.tokenizer.encode(text, None if body.add_special_tokens else False)
    else:
        ids = encode_chat(tokenize_request(body), served)
    return encode({"count": len(ids), "max_model_len": served.context, "tokens": ids})


def detokenize(body: DetokenizeBody, served: ServedModel) -> bytes:
    """Text of ids. Raises InvalidValue."""
    if any(not 0 <= t < len(served.tokenizer.bytes) for t in body.tokens):
        raise InvalidValue("a token is outside the vocabulary", "tokens")
    text = served.tokenizer.decode(body.tokens)
    return encode({"prompt": text, "content": text})
