"""OpenAI's response shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.server.generation import Piece, Served, TokenInfo, Usage
from octavo.text import CallDelta, Tokenizer

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
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


def _token_entry(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, Any]:
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
            None if t.logprob is None
            else {_token_entry(tokenizer, i, 0)["token"]: p for i, p in t.top}
            for t in tokens
        ],
        "text_offset": offsets,
    }  # fmt: skip


def prompt_logprobs(tokenizer: Tokenizer, tokens: list[TokenInfo]) -> list[Any]:
    """vLLM's form: for each token a map of ids, itself among them, to log-probabilities."""
    out: list[Any] = []
    for t in tokens:
        if t.logprob is None:
            out.append(None)
            continue
        entries = dict(t.top) | {t.token: t.logprob}
        out.append(
            {
                str(i): {"logprob": p, "decoded_token": _token_entry(tokenizer, i, 0)["token"]}
                for i, p in entries.items()
            }
        )
    return out


def _scored(choice: dict[str, Any], piece: Piece) -> dict[str, Any]:
    """With the score of a beam, where it is one."""
    return choice if piece.score is None else {**choice, "score": piece.score}


def _tool_call(call: CallDelta) -> dict[str, Any]:
    """A streamed piece of a tool call."""
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _whole_calls(calls: Iterable[CallDelta]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for call in calls:
        if call.id is not None:
            function = {"name": call.name, "arguments": ""}
            out.append({"id": call.id, "type": "function", "function": function})
        out[call.index]["function"]["arguments"] += call.arguments
    return out


class Shape:
    """How pieces become a reply. `chat` and plain completions differ only here."""

    def __init__(
        self, chat: bool, served: Served, reply_id: str, created: int, logprobs: bool,
        echo: bool = False,
    ) -> None:  # fmt: skip
        self.chat, self.served, self.logprobs, self.echo = chat, served, logprobs, echo
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
        """The chunks of a piece: what it says first, then the end."""
        out = b""
        if piece.text or piece.tokens or piece.reasoning or piece.calls:
            body: dict[str, Any] = {"text": piece.text}
            if self.chat:
                body = {"delta": self._delta(piece)}
            logprobs = self._logprobs(piece.choice, piece.tokens)
            out += self._chunk([self._choice(piece.choice, body, logprobs, None)], None, with_usage)
        if piece.finish:
            body = {"delta": {}} if self.chat else {"text": ""}
            choice = self._choice(piece.choice, body, None, piece.finish)
            out += self._chunk([_scored(choice, piece)], None, with_usage)
        return out

    def _delta(self, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.calls:
            delta["tool_calls"] = [_tool_call(c) for c in piece.calls]
        if piece.text or not delta:
            delta["content"] = piece.text
        return delta

    def closing(self, usage: Usage) -> bytes:
        return self._chunk([], usage, True)

    def whole(self, choices: list[list[Piece]], usage: Usage) -> bytes:
        """The reply of a request that does not stream, from the pieces of each choice."""
        out = []
        scored: list[Any] | None = None
        for index, pieces in enumerate(choices):
            if not pieces:
                continue  # a beam search may find fewer texts than were asked for
            text = "".join(p.text for p in pieces)
            finish = next((p.finish for p in pieces if p.finish), None)
            logprobs = self._logprobs(index, [t for p in pieces for t in p.tokens])
            body = {"message": self._message(text, pieces)} if self.chat else {"text": text}
            choice = self._choice(index, body, logprobs, finish)
            prompt = next((p.prompt for p in pieces if p.prompt), None)
            if prompt is not None and not self.echo:
                scored = prompt_logprobs(self.served.tokenizer, prompt)
                if not self.chat:
                    choice["prompt_logprobs"] = scored
            out.append(_scored(choice, pieces[-1]))
        reply: dict[str, Any] = dict(self._base, choices=out, usage=usage.to_dict())
        if self.chat and scored is not None:
            reply["prompt_logprobs"] = scored
        return encode(reply)

    def _message(self, text: str, pieces: list[Piece]) -> dict[str, Any]:
        calls = _whole_calls(c for p in pieces for c in p.calls)
        reasoning = "".join(p.reasoning for p in pieces)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        if reasoning:
            message["reasoning_content"] = reasoning
        return message
