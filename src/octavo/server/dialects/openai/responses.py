"""OpenAI's response shapes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.generate.prepare import PreparedRequest
from octavo.generate.reply import TextDelta, TokenInfo, Usage, whole_calls
from octavo.server.dialects.openai.schemas import ChatBody, CompletionBody
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


def error_body(error: RequestError) -> bytes:
    """The JSON of an error response."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    kind = KINDS.get(error.status, kind)
    entry = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return encode({"error": entry})


def sse(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def _token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    return tokenizer.bytes[token] or tokenizer.name(token).encode()


def _token_entry(
    tokenizer: Tokenizer, token: int, logprob: float | None, named: bool = False
) -> dict[str, Any]:
    raw = _token_bytes(tokenizer, token)
    text = f"token_id:{token}" if named else raw.decode("utf-8", "replace")
    return {"token": text, "logprob": logprob, "bytes": list(raw)}


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[TokenInfo], named: bool) -> dict[str, Any]:
    content = []
    for t in tokens:
        top = [_token_entry(tokenizer, token, logprob, named) for token, logprob in t.top]
        content.append({**_token_entry(tokenizer, t.token, t.logprob, named), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _key(tokenizer: Tokenizer, token: int, named: bool) -> str:
    """A token as the older endpoint writes it: its text, or its bytes if they are no text."""
    if named:
        return f"token_id:{token}"
    raw = _token_bytes(tokenizer, token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _alternatives(tokenizer: Tokenizer, info: TokenInfo, named: bool) -> dict[str, float] | None:
    """Log-probabilities by token, the sampled one among them; tokens of one text are told apart."""
    if info.logprob is None:
        return None
    out: dict[str, float] = {}
    for token, logprob in (dict(info.top) | {info.token: info.logprob}).items():
        key = _key(tokenizer, token, named)
        out[f"token_id:{token}" if key in out else key] = logprob
    return out


def completion_logprobs(
    tokenizer: Tokenizer, tokens: list[TokenInfo], offset: int, named: bool
) -> tuple[dict[str, Any], int]:
    """The tokens' log-probabilities, and where the text after them begins."""
    offsets = []
    for t in tokens:
        offsets.append(offset)
        offset += len(_token_bytes(tokenizer, t.token).decode("utf-8", "replace"))
    value = {
        "tokens": [_key(tokenizer, t.token, named) for t in tokens],
        "token_logprobs": [t.logprob for t in tokens],
        "top_logprobs": [_alternatives(tokenizer, t, named) for t in tokens],
        "text_offset": offsets,
    }
    return value, offset


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


def _scored(choice: dict[str, Any], piece: TextDelta) -> dict[str, Any]:
    """With the score of a beam, where it is one."""
    return choice if piece.score is None else {**choice, "score": piece.score}


def _tool_call(call: CallDelta) -> dict[str, Any]:
    """A streamed piece of a tool call."""
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _role(body: ChatBody) -> str:
    """Whose message the reply is: the assistant's, unless it continues another's."""
    if body.add_generation_prompt is None and not body.continue_final_message:
        return "assistant"
    return "assistant" if body.add_generation_prompt else (body.messages or [])[-1].role


class ResponseWriter:
    """How pieces become a reply. `chat` and plain completions differ only here."""

    media_type = "text/event-stream; charset=utf-8"

    def __init__(self, body: ChatBody | CompletionBody, job: PreparedRequest, usage: Usage) -> None:
        self._job, self._served, self._usage = job, job.model, usage
        self.stream = bool(body.stream)
        stream = body.stream_options
        self._with_usage = stream is not None and bool(stream.include_usage)
        self._running = self._with_usage and bool(stream and stream.continuous_usage_stats)
        self._chat = isinstance(body, ChatBody)
        self._role = _role(body) if isinstance(body, ChatBody) else ""
        self._ids = bool(body.return_token_ids)
        self._named = bool(body.return_tokens_as_token_ids)
        self._base = {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + secrets.token_hex(12),
            "object": "chat.completion" if self._chat else "text_completion",
            "created": int(time.time()),
            "model": job.model.name,
        }
        self._offsets: dict[int, int] = {}
        self._generated: dict[int, int] = {}  # tokens of each choice

    def _logprobs(self, choice: int, tokens: list[TokenInfo]) -> dict[str, Any] | None:
        if self._job.params.logprobs is None:
            return None
        tokenizer, named = self._served.tokenizer, self._named
        if self._chat:
            return chat_logprobs(tokenizer, tokens, named)
        begin = self._offsets.get(choice, 0)
        value, self._offsets[choice] = completion_logprobs(tokenizer, tokens, begin, named)
        return value

    def _prompt(self, choice: int) -> list[int]:
        return self._job.prompts[choice // self._job.made]

    def _choice(
        self, index: int, body: dict[str, Any], logprobs: Any, finish: str | None
    ) -> dict[str, Any]:
        return {"index": index, **body, "logprobs": logprobs, "finish_reason": finish}

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        chunk: dict[str, Any] = dict(self._base, choices=choices, **more)
        if self._chat:
            chunk["object"] = "chat.completion.chunk"
        if self._with_usage:
            chunk.setdefault("usage", None)
        if self._running and choices:
            chunk["usage"] = self._so_far(choices[0]["index"])
        return sse(chunk)

    def _so_far(self, choice: int) -> dict[str, int]:
        """What a choice has used until now."""
        prompt, generated = len(self._prompt(choice)), self._generated.get(choice, 0)
        return {"prompt_tokens": prompt, "completion_tokens": generated,
                "total_tokens": prompt + generated}  # fmt: skip

    def opening(self) -> bytes:
        """The chunks that begin the choices; plain completions have none."""
        if not self._chat:
            return b""
        (prompt,) = self._job.prompts
        delta = {"delta": {"role": self._role, "content": "", "refusal": None}}
        more = {"prompt_token_ids": prompt} if self._ids else {}
        opened = [self._choice(i, delta, None, None) for i in range(self._job.made)]
        return b"".join(self._chunk([choice], **more) for choice in opened)

    def chunks(self, piece: TextDelta) -> bytes:
        """The chunks of a piece: what it says first, then the end."""
        out, ids = b"", self._token_ids(piece)
        self._generated[piece.choice] = self._generated.get(piece.choice, 0) + len(piece.ids)
        if piece.text or piece.tokens or piece.reasoning or piece.calls:
            body: dict[str, Any] = {"text": piece.text}
            if self._chat:
                body = {"delta": self._delta(piece)}
            logprobs = self._logprobs(piece.choice, piece.tokens)
            out += self._chunk([self._choice(piece.choice, {**body, **ids}, logprobs, None)])
            ids = {}
        if piece.finish:
            body = {"delta": {}} if self._chat else {"text": ""}
            choice = self._choice(piece.choice, {**body, **ids}, None, piece.finish)
            out += self._chunk([_scored(choice, piece)])
        return out

    def _token_ids(self, piece: TextDelta) -> dict[str, Any]:
        """The token ids of a piece, and with a choice's first its prompt's, if they are wanted."""
        if not self._ids:
            return {}
        ids: dict[str, Any] = {"token_ids": piece.ids}
        if not self._chat and piece.choice not in self._generated:
            ids["prompt_token_ids"] = self._prompt(piece.choice)
        return ids

    def _delta(self, piece: TextDelta) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.calls:
            delta["tool_calls"] = [_tool_call(c) for c in piece.calls]
        if piece.text or not delta:
            delta["content"] = piece.text
        return delta

    def closing(self) -> bytes:
        """The chunk of the whole usage, if it is wanted, and the end."""
        last = self._chunk([], usage=self._usage.to_dict()) if self._with_usage else b""
        return last + DONE

    def failure(self, error: RequestError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n" + DONE

    def whole(self, choices: Sequence[Sequence[TextDelta]]) -> bytes:
        """The reply of a request that does not stream, from the pieces of each choice."""
        out = []
        scored: list[Any] | None = None
        for index, pieces in enumerate(choices):
            if not pieces:
                continue  # a beam search may find fewer texts than were asked for
            text = "".join(p.text for p in pieces)
            finish = next((p.finish for p in pieces if p.finish), None)
            logprobs = self._logprobs(index, [t for p in pieces for t in p.tokens])
            body: dict[str, Any] = {"text": text}
            if self._chat:
                body = {"message": self._message(text, pieces)}
            if self._ids:
                body["token_ids"] = [i for p in pieces for i in p.ids]
                if not self._chat:
                    body["prompt_token_ids"] = self._job.prompts[index // self._job.n]
            choice = self._choice(index, body, logprobs, finish)
            prompt = next((p.prompt for p in pieces if p.prompt), None)
            if prompt is not None and not self._job.echo:
                scored = prompt_logprobs(self._served.tokenizer, prompt)
                if not self._chat:
                    choice["prompt_logprobs"] = scored
            out.append(_scored(choice, pieces[-1]))
        reply: dict[str, Any] = dict(self._base, choices=out, usage=self._usage.to_dict())
        if self._chat and scored is not None:
            reply["prompt_logprobs"] = scored
        if self._chat and self._ids:
            reply["prompt_token_ids"] = self._job.prompts[0]
        return encode(reply)

    def _message(self, text: str, pieces: Sequence[TextDelta]) -> dict[str, Any]:
        calls = [
            {"id": c.id, "type": "function",
             "function": {"name": c.name, "arguments": c.arguments}}
            for c in whole_calls(pieces)
        ]  # fmt: skip
        reasoning = "".join(p.reasoning for p in pieces)
        message: dict[str, Any] = {"role": self._role, "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        if reasoning:
            message["reasoning_content"] = reasoning
        return message
