"""OpenAI's response shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.server.generation import Piece, Served, TokenInfo, Usage
from octavo.text import Tokenizer

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "service_unavailable",
}
DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> bytes:
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_frame(error: RequestError) -> bytes:
    """An error after the first byte of a stream has been sent."""
    return b"data: " + error_body(error.status, str(error), error.param, error.code) + b"\n\n"


def sse(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def _token_entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.bytes[token] or tokenizer.name(token).encode()
    return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[TokenInfo]) -> dict[str, Any]:
    content = []
    for t in tokens:
        top = [_token_entry(tokenizer, token, logprob) for token, logprob in t.top]
        content.append({**_token_entry(tokenizer, t.token, t.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, tokens: list[TokenInfo], offset: int
) -> dict[str, Any]:
    texts = [_token_entry(tokenizer, t.token, 0)["token"] for t in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [t.logprob for t in tokens],
        "top_logprobs": [
            {_token_entry(tokenizer, i, 0)["token"]: p for i, p in t.top} for t in tokens
        ],
        "text_offset": offsets,
    }


class Shape:
    """How pieces become a reply. `chat` and plain completions differ only here."""

    def __init__(
        self, chat: bool, served: Served, reply_id: str, created: int, logprobs: bool
    ) -> None:
        self.chat, self.served, self.logprobs = chat, served, logprobs
        kind = "chat.completion" if chat else "text_completion"
        self._base = {"id": reply_id, "object": kind, "created": created, "model": served.name}
        self._offsets: dict[int, int] = {}

    def _logprobs(self, choice: int, tokens: list[TokenInfo]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        if self.chat:
            return chat_logprobs(self.served.tokenizer, tokens)
        value = completion_logprobs(self.served.tokenizer, tokens, self._offsets.get(choice, 0))
        self._offsets[choice] = self._offsets.get(choice, 0) + sum(map(len, value["tokens"]))
        return value

    def _choice(
        self, index: int, body: dict[str, Any], logprobs: Any, finish: str | None
    ) -> dict[str, Any]:
        return {"index": index, **body, "logprobs": logprobs, "finish_reason": finish}

    def _chunk(self, choices: list[dict[str, Any]], usage: Usage | None, with_usage: bool) -> bytes:
        chunk: dict[str, Any] = dict(self._base, choices=choices)
        if self.chat:
            chunk["object"] = "chat.completion.chunk"
        if with_usage:
            chunk["usage"] = usage.to_dict() if usage else None
        return sse(chunk)

    def opening(self, index: int, with_usage: bool) -> bytes:
        """The chunk that begins a choice; plain completions have none."""
        if not self.chat:
            return b""
        delta = {"delta": {"role": "assistant", "content": "", "refusal": None}}
        return self._chunk([self._choice(index, delta, None, None)], None, with_usage)

    def chunks(self, piece: Piece, with_usage: bool) -> bytes:
        """The chunks of a piece: text first, then the end."""
        out = b""
        body: dict[str, Any]
        if piece.text or piece.tokens:
            body = {"delta": {"content": piece.text}} if self.chat else {"text": piece.text}
            logprobs = self._logprobs(piece.choice, piece.tokens)
            out += self._chunk([self._choice(piece.choice, body, logprobs, None)], None, with_usage)
        if piece.finish:
            body = {"delta": {}} if self.chat else {"text": ""}
            out += self._chunk(
                [self._choice(piece.choice, body, None, piece.finish)], None, with_usage
            )
        return out

    def closing(self, usage: Usage) -> bytes:
        return self._chunk([], usage, True)

    def whole(self, pieces: list[Piece], count: int, usage: Usage) -> bytes:
        """The reply of a request that does not stream."""
        choices = []
        for index in range(count):
            own = [p for p in pieces if p.choice == index]
            text = "".join(p.text for p in own)
            finish = next((p.finish for p in own if p.finish), None)
            message = {"message": {"role": "assistant", "content": text, "refusal": None}}
            logprobs = self._logprobs(index, [t for p in own for t in p.tokens])
            choices.append(
                self._choice(index, message if self.chat else {"text": text}, logprobs, finish)
            )
        return encode(dict(self._base, choices=choices, usage=usage.to_dict()))
