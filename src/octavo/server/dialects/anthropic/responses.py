"""Responses of Anthropic's API: messages, whole or as events, and counts of tokens."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.generate.model import ServedModel
from octavo.generate.prepare import PreparedRequest, encode_chat
from octavo.generate.reply import TextDelta, Usage, call_arguments
from octavo.server.dialect import error_event
from octavo.server.dialects.anthropic.errors import error_body
from octavo.server.dialects.anthropic.requests import count_request
from octavo.server.dialects.anthropic.schemas import CountBody, MessagesBody
from octavo.server.dialects.blocks import Block, Blocks, Change, blocks

encode = msgspec.json.Encoder().encode


def event(name: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode({"type": name, **fields}))


def count_tokens(body: CountBody, served: ServedModel) -> bytes:
    """How many tokens a prompt has. Raises RequestError."""
    return encode({"input_tokens": len(encode_chat(count_request(body), served))})


class MessageWriter:
    """Writes a message. See `dialect`."""

    media_type = "text/event-stream; charset=utf-8"

    def __init__(self, body: MessagesBody, job: PreparedRequest, usage: Usage) -> None:
        self._job, self._usage = job, usage
        self.stream = bool(body.stream)
        thinking = body.thinking
        self._omitted = thinking is not None and thinking.display == "omitted"
        self._limit = body.max_tokens
        self._id = "msg_" + secrets.token_hex(12)
        self._blocks = Blocks()
        self._last: TextDelta | None = None

    def _message(self, content: list[Any], last: TextDelta | None) -> dict[str, Any]:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self._job.model.name,
            "content": content, **self._stop(last), "usage": self._counts(),
        }  # fmt: skip

    def _counts(self) -> dict[str, Any]:
        """Tokens. Those of the prompt that were cached are counted apart."""
        usage = self._usage
        return {
            "input_tokens": usage.prompt - usage.cached, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached, "output_tokens": usage.completion,
        }  # fmt: skip

    def _stop(self, last: TextDelta | None) -> dict[str, Any]:
        """How the message ended, if it did."""
        reason = None
        finish, found = (last.finish, last.stop_string) if last else (None, None)
        if finish == "length":
            reached = self._usage.completion >= self._limit
            reason = "max_tokens" if reached else "model_context_window_exceeded"
        elif finish == "tool_calls":
            reason, found = "tool_use", None
        elif finish is not None:
            reason = "end_turn" if found is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": found}

    def _block(self, block: Block, whole: bool) -> dict[str, Any]:
        text = block.text if whole else ""
        if block.kind == "thoughts":
            return {"type": "thinking", "thinking": self._thought(text), "signature": ""}
        if block.kind == "text":
            return {"type": "text", "text": text, "citations": None}
        given = call_arguments(text)
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": given}

    def _thought(self, text: str) -> str:
        return "" if self._omitted else text

    def opening(self) -> bytes:
        return event("message_start", message=self._message([], None))

    def chunks(self, delta: TextDelta) -> bytes:
        """The events of a delta: blocks that begin, grow and end."""
        if delta.finish:
            self._last = delta
        return b"".join(self._event(change) for change in self._blocks.push(delta))

    def _event(self, change: Change) -> bytes:
        block, text = change.block, change.text
        if change.step == "open":
            begun = self._block(block, whole=False)
            return event("content_block_start", index=block.index, content_block=begun)
        if change.step == "close":
            return event("content_block_stop", index=block.index)
        match block.kind:
            case "thoughts":
                delta = {"type": "thinking_delta", "thinking": self._thought(text)}
            case "text":
                delta = {"type": "text_delta", "text": text}
            case _:
                delta = {"type": "input_json_delta", "partial_json": text}
        return event("content_block_delta", index=block.index, delta=delta)

    def closing(self) -> bytes:
        ended = event("message_delta", delta=self._stop(self._last), usage=self._counts())
        return ended + event("message_stop")

    def failure(self, error: RequestError) -> bytes:
        return error_event(error_body(error))

    def whole(self, choices: Sequence[Sequence[TextDelta]]) -> bytes:
        """The message of a request that does not stream."""
        (deltas,) = choices
        content = [self._block(block, whole=True) for block in blocks(deltas)]
        return encode(self._message(content, deltas[-1]))
