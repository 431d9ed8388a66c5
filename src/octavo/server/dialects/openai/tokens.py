"""Responses of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from octavo.errors import InvalidValue
from octavo.generate.model import ServedModel
from octavo.generate.prepare import encode_chat
from octavo.server.dialects.openai.requests import conversation_request
from octavo.server.dialects.openai.responses import encode
from octavo.server.dialects.openai.schemas import DetokenizeBody, TokenizeBody


def tokenize(body: TokenizeBody, served: ServedModel) -> bytes:
    """Ids of a text, or of a conversation as a chat would begin. Raises RequestError."""
    if (body.prompt, body.content, body.messages).count(None) != 2:
        raise InvalidValue("give either prompt or messages", "prompt")
    if body.messages is None:
        ids = _ids(body, served)
    else:
        ids = encode_chat(conversation_request(body), served)
    tokens = [_piece(token, served) for token in ids] if body.with_pieces else ids
    return encode({"count": len(ids), "max_model_len": served.context, "tokens": tokens})


def _ids(body: TokenizeBody, served: ServedModel) -> list[int]:
    """Ids of a text."""
    begins = body.add_special_tokens if body.add_special is None else body.add_special
    text, tokenizer = body.prompt or body.content or "", served.tokenizer
    bos = tokenizer.special.bos
    if not body.parse_special:
        return tokenizer.encode(text, False if begins is False else None)
    ids, wanted = tokenizer.encode_rendered(text), begins is not False
    return [bos, *ids] if wanted and tokenizer.special.add_bos and bos is not None else ids


def _piece(token: int, served: ServedModel) -> dict[str, Any]:
    """A token with its text, or with its bytes if they are not UTF-8."""
    raw = served.tokenizer.spelled(token)
    try:
        return {"id": token, "piece": raw.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(raw)}


def detokenize(body: DetokenizeBody, served: ServedModel) -> bytes:
    """Text of ids. Raises InvalidValue."""
    if any(not 0 <= t < len(served.tokenizer.bytes) for t in body.tokens):
        raise InvalidValue("a token is outside the vocabulary", "tokens")
    text = served.tokenizer.decode(body.tokens)
    return encode({"prompt": text, "content": text})
