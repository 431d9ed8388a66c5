"""Responses of Ollama's API: chats, continuations and vectors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from octavo.checkpoint.pooling import Vector, unit
from octavo.errors import RequestError
from octavo.generate.model import ServedModel
from octavo.generate.prepare import PreparedRequest
from octavo.generate.reply import TextDelta, Usage, call_arguments
from octavo.generate.sampling import sampling_params
from octavo.server.dialect import DownloadProgress
from octavo.server.dialects.blocks import Block, Blocks, blocks
from octavo.server.dialects.ollama.requests import chat_request, generate_request
from octavo.server.dialects.ollama.schemas import ChatBody, EmbedBody, EmbeddingsBody, GenerateBody
from octavo.server.dialects.openai.responses import chat_logprobs

encode = msgspec.json.Encoder().encode
NANO = 1_000_000_000
ERROR_SCHEMA = {
    "type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"],
}  # fmt: skip


def error_body(error: RequestError) -> bytes:
    """The JSON of an error response."""
    return encode({"error": str(error)})


def rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def nothing(body: ChatBody | GenerateBody, served: ServedModel) -> bytes | None:
    """The response of a body without anything to answer, which only has the model loaded. Raises
    RequestError for what is wrong with the rest of it."""
    if body.messages if isinstance(body, ChatBody) else body.prompt:
        return None
    asked = chat_request(body) if isinstance(body, ChatBody) else generate_request(body)
    sampling_params(asked.sampling, served).check(served.vocabulary)
    empty: dict[str, Any] = {"response": ""}
    if isinstance(body, ChatBody):
        empty = {"message": {"role": "assistant", "content": ""}}
    base = {"model": served.name, "created_at": rfc3339(time.time())}
    return encode({**base, **empty, "done_reason": "load", "done": True})


def embed_reply(
    body: EmbedBody, served: ServedModel, pooled: Sequence[Vector], tokens: int
) -> bytes:
    """Vectors of length 1."""
    vectors = [unit(served.pooling.finish(v, body.dimensions)).tolist() for v in pooled]
    return encode({"model": served.name, "embeddings": vectors, "prompt_eval_count": tokens})


def embeddings_reply(
    body: EmbeddingsBody, served: ServedModel, pooled: Sequence[Vector], tokens: int
) -> bytes:
    """The vector of the prompt; empty where there was none."""
    vector = [x for v in pooled for x in served.pooling.finish(v).tolist()]
    return encode({"embedding": vector})


def pull_line(status: str, name: str, progress: DownloadProgress | None) -> bytes:
    """How far a model is that is being fetched."""
    line: dict[str, Any] = {"status": status}
    if progress is not None:
        line |= {"digest": name, "total": progress.total, "completed": progress.done}
    return encode(line)


class LineWriter:
    """Writes the response of a chat or a continuation, which differ only here. See `dialect`."""

    media_type = "application/x-ndjson"

    def __init__(self, body: ChatBody | GenerateBody, job: PreparedRequest, usage: Usage) -> None:
        self._job, self._usage = job, usage
        self.stream = body.stream is not False
        self._chat = isinstance(body, ChatBody)
        self._logprobs = bool(body.logprobs)
        self._blocks = Blocks()

    def _line(self, **fields: Any) -> dict[str, Any]:
        return {"model": self._job.model.name, "created_at": rfc3339(time.time()), **fields}

    def _said(self, text: str, thoughts: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        more: dict[str, Any] = {"thinking": thoughts} if thoughts else {}
        if calls:
            more["tool_calls"] = calls
        if self._chat:
            return {"message": {"role": "assistant", "content": text, **more}}
        return {"response": text, **more}

    def _scored(self, delta: TextDelta) -> list[dict[str, Any]]:
        tokenizer = self._job.model.tokenizer
        content: list[dict[str, Any]] = chat_logprobs(tokenizer, delta.tokens, False)["content"]
        return content

    def opening(self) -> bytes:
        return b""

    def chunks(self, delta: TextDelta) -> bytes:
        """A line with what a delta says. A call is told when it is complete."""
        calls = [
            _call(change.block) for change in self._blocks.push(delta)
            if change.step == "close" and change.block.kind == "call"
        ]  # fmt: skip
        out = b""
        if delta.text or delta.reasoning or calls or delta.tokens:
            fields = self._said(delta.text, delta.reasoning, calls)
            if self._logprobs:
                fields["logprobs"] = self._scored(delta)
            out = encode(self._line(**fields, done=False)) + b"\n"
        if delta.finish:
            out += encode(self._line(**self._said("", "", []), **self._end(delta))) + b"\n"
        return out

    def _end(self, last: TextDelta) -> dict[str, Any]:
        """How the reply ended, and what it took. Loading includes the time in the queue."""
        usage, now = self._usage, time.monotonic()
        begun = usage.began + usage.queued
        first = usage.first or now
        return {
            "done": True, "done_reason": "length" if last.finish == "length" else "stop",
            "total_duration": int((now - usage.began) * NANO),
            "load_duration": int(usage.queued * NANO),
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": max(int((first - begun) * NANO), 0),
            "eval_count": usage.completion,
            "eval_duration": max(int(((usage.last or now) - first) * NANO), 0),
        }  # fmt: skip

    def closing(self) -> bytes:
        return b""

    def failure(self, error: RequestError) -> bytes:
        return error_body(error) + b"\n"

    def whole(self, choices: Sequence[Sequence[TextDelta]]) -> bytes:
        """The response of a request that does not stream."""
        (deltas,) = choices
        text = "".join(d.text for d in deltas)
        thoughts = "".join(d.reasoning for d in deltas)
        calls = [_call(block) for block in blocks(deltas) if block.kind == "call"]
        fields = self._said(text, thoughts, calls)
        if self._logprobs:
            fields["logprobs"] = [t for d in deltas for t in self._scored(d)]
        return encode(self._line(**fields, **self._end(deltas[-1])))


def _call(block: Block) -> dict[str, Any]:
    function = {"name": block.name, "arguments": call_arguments(block.text)}
    return {"id": block.id, "function": function}
