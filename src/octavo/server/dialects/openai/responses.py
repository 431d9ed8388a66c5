"""Responses of OpenAI's API: chat completions and completions."""

from __future__ import annotations

import secrets
import time
from codecs import getincrementaldecoder
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.generate.prepare import PreparedRequest
from octavo.generate.reply import TextDelta, TokenInfo, Usage, prompt_scores, whole_calls
from octavo.server.dialects.openai.errors import error_body
from octavo.server.dialects.openai.schemas import ChatBody, CompletionBody
from octavo.text import CallDelta, Tokenizer

DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode


def sse(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def token_entry(
    tokenizer: Tokenizer, token: int, logprob: float | None, named: bool = False
) -> dict[str, Any]:
    raw = tokenizer.spelled(token)
    text = f"token_id:{token}" if named else raw.decode("utf-8", "replace")
    return {"token": text, "logprob": logprob, "bytes": list(raw)}


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[TokenInfo], named: bool) -> dict[str, Any]:
    content = []
    for t in tokens:
        top = [token_entry(tokenizer, token, logprob, named) for token, logprob in t.top]
        content.append({**token_entry(tokenizer, t.token, t.logprob, named), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _key(tokenizer: Tokenizer, token: int, named: bool) -> str:
    """A token as completions write it: its text, or its bytes if they are not UTF-8."""
    if named:
        return f"token_id:{token}"
    raw = tokenizer.spelled(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _alternatives(tokenizer: Tokenizer, info: TokenInfo, named: bool) -> dict[str, float] | None:
    """Log-probabilities by token, including the sampled one. Equal texts get distinct keys."""
    if info.logprob is None:
        return None
    out: dict[str, float] = {}
    for token, logprob in (dict(info.top) | {info.token: info.logprob}).items():
        key = _key(tokenizer, token, named)
        out[f"token_id:{token}" if key in out else key] = logprob
    return out


class Offsets:
    """Where in a text its tokens begin: those that hold a part of a character begin with it."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def push(self, token: bytes) -> int:
        """Where the next token begins."""
        begin = self._length
        self._length += len(self._decoder.decode(token))
        return begin


def completion_logprobs(
    tokenizer: Tokenizer, tokens: list[TokenInfo], offsets: Offsets, named: bool
) -> dict[str, Any]:
    """The tokens' log-probabilities. offsets: of the tokens before them."""
    return {
        "tokens": [_key(tokenizer, t.token, named) for t in tokens],
        "token_logprobs": [t.logprob for t in tokens],
        "top_logprobs": [_alternatives(tokenizer, t, named) for t in tokens],
        "text_offset": [offsets.push(tokenizer.spelled(t.token)) for t in tokens],
    }


def prompt_logprobs(tokenizer: Tokenizer, tokens: list[TokenInfo], top: int) -> list[Any]:
    """vLLM's form: for each token a map of ids, itself among them, to log-probabilities. top: how
    many others."""
    out: list[Any] = []
    for t in tokens:
        if t.logprob is None:
            out.append(None)
            continue
        entries = dict(t.top[:top]) | {t.token: t.logprob}
        out.append(
            {
                str(i): {"logprob": p, "decoded_token": token_entry(tokenizer, i, 0)["token"]}
                for i, p in entries.items()
            }
        )
    return out


def _scored(choice: dict[str, Any], delta: TextDelta) -> dict[str, Any]:
    """A choice with its score if a beam search found it."""
    return choice if delta.score is None else {**choice, "score": delta.score}


def _tool_call(call: CallDelta) -> dict[str, Any]:
    """What a delta adds to a tool call."""
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _role(body: ChatBody) -> str:
    """Whose message the reply is: the assistant's, unless it continues another's."""
    if body.add_generation_prompt is None and not body.continue_final_message:
        return "assistant"
    return "assistant" if body.add_generation_prompt else (body.messages or [])[-1].role


def error_event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n" + DONE


class ResponseWriter:
    """Writes the response of a chat or a completion, which differ only here. See `dialect`."""

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
        self._prompt_top = body.prompt_logprobs  # alternatives
        self._named = bool(body.return_tokens_as_token_ids)
        self._base = {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + secrets.token_hex(12),
            "object": "chat.completion" if self._chat else "text_completion",
            "created": int(time.time()),
            "model": job.model.name,
        }
        if body.resume is not None:
            self._base |= {"id": body.resume.id, "created": body.resume.created}
        self._offsets = defaultdict[int, Offsets](Offsets)
        self._generated: dict[int, int] = {}  # tokens of each choice

    def _logprobs(self, choice: int, tokens: list[TokenInfo]) -> dict[str, Any] | None:
        if self._job.params.logprobs is None:
            return None
        tokenizer, named = self._served.tokenizer, self._named
        if self._chat:
            return chat_logprobs(tokenizer, tokens, named)
        return completion_logprobs(tokenizer, tokens, self._offsets[choice], named)

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
        """The usage of one choice until now."""
        prompt, generated = len(self._prompt(choice)), self._generated.get(choice, 0)
        return {"prompt_tokens": prompt, "completion_tokens": generated,
                "total_tokens": prompt + generated}  # fmt: skip

    def opening(self) -> bytes:
        """A chunk with the role for each choice of a chat; completions have none."""
        if not self._chat:
            return b""
        (prompt,) = self._job.prompts
        delta = {"delta": {"role": self._role, "content": "", "refusal": None}}
        more = {"prompt_token_ids": prompt} if self._ids else {}
        opened = [self._choice(i, delta, None, None) for i in range(self._job.made)]
        return b"".join(self._chunk([choice], **more) for choice in opened)

    def chunks(self, delta: TextDelta) -> bytes:
        """A chunk with the text of a delta, and one with the finish reason if it has one."""
        out, ids = b"", self._token_ids(delta)
        self._generated[delta.choice] = self._generated.get(delta.choice, 0) + len(delta.ids)
        if delta.text or delta.tokens or delta.reasoning or delta.calls:
            body: dict[str, Any] = {"text": delta.text}
            if self._chat:
                body = {"delta": self._delta(delta)}
            logprobs = self._logprobs(delta.choice, delta.tokens)
            out += self._chunk([self._choice(delta.choice, {**body, **ids}, logprobs, None)])
            ids = {}
        if delta.finish:
            body = {"delta": {}} if self._chat else {"text": ""}
            choice = self._choice(delta.choice, {**body, **ids}, None, delta.finish)
            out += self._chunk([_scored(choice, delta)])
        return out

    def _token_ids(self, delta: TextDelta) -> dict[str, Any]:
        """Token ids, if they are wanted: of a delta, and of the prompt with a choice's first."""
        if not self._ids:
            return {}
        ids: dict[str, Any] = {"token_ids": delta.ids}
        if not self._chat and delta.choice not in self._generated:
            ids["prompt_token_ids"] = self._prompt(delta.choice)
        return ids

    def _delta(self, delta: TextDelta) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if delta.reasoning:
            fields["reasoning_content"] = delta.reasoning
        if delta.calls:
            fields["tool_calls"] = [_tool_call(c) for c in delta.calls]
        if delta.text or not fields:
            fields["content"] = delta.text
        return fields

    def closing(self) -> bytes:
        """The chunk with the usage of all choices, if it is wanted, and the end."""
        last = self._chunk([], usage=self._usage.to_dict()) if self._with_usage else b""
        return last + DONE

    def failure(self, error: RequestError) -> bytes:
        return error_event(error_body(error))

    def whole(self, choices: Sequence[Sequence[TextDelta]]) -> bytes:
        """The response of a request that does not stream."""
        out = []
        scored: list[Any] | None = None
        prompts = prompt_scores(self._job.prompts, choices)
        for index, deltas in enumerate(choices):
            if not deltas:
                continue  # a beam search may find fewer texts than were asked for
            text = "".join(d.text for d in deltas)
            finish = next((d.finish for d in deltas if d.finish), None)
            logprobs = self._logprobs(index, [t for d in deltas for t in d.tokens])
            body: dict[str, Any] = {"text": text}
            if self._chat:
                body = {"message": self._message(text, deltas)}
            if self._ids:
                body["token_ids"] = [i for d in deltas for i in d.ids]
                if not self._chat:
                    body["prompt_token_ids"] = self._job.prompts[index // self._job.n]
            choice = self._choice(index, body, logprobs, finish)
            if self._prompt_top is not None and prompts[index]:
                tokenizer = self._served.tokenizer
                scored = prompt_logprobs(tokenizer, prompts[index], self._prompt_top)
                if not self._chat:
                    choice["prompt_logprobs"] = scored
            out.append(_scored(choice, deltas[-1]))
        reply: dict[str, Any] = dict(self._base, choices=out, usage=self._usage.to_dict())
        if self._chat and scored is not None:
            reply["prompt_logprobs"] = scored
        if self._chat and self._ids:
            reply["prompt_token_ids"] = self._job.prompts[0]
        return encode(reply)

    def _message(self, text: str, deltas: Sequence[TextDelta]) -> dict[str, Any]:
        calls = [
            {"id": c.id, "type": "function",
             "function": {"name": c.name, "arguments": c.arguments}}
            for c in whole_calls(deltas)
        ]  # fmt: skip
        reasoning = "".join(d.reasoning for d in deltas)
        message: dict[str, Any] = {"role": self._role, "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        if reasoning:
            message["reasoning_content"] = reasoning
        return message
