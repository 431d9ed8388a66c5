"""Responses of /v1/responses: an object whose output is a list of items, or typed events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.generate.prepare import PreparedRequest
from octavo.generate.reply import TextDelta, TokenInfo, Usage
from octavo.server.dialects.blocks import Block, Blocks, Change
from octavo.server.dialects.openai.items import ResponsesBody, read_items
from octavo.server.dialects.openai.responses import chat_logprobs, encode

Object = dict[str, Any]
PREFIXES = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco",
}  # fmt: skip
PREFIX = {"thoughts": "rs_", "text": "msg_", "call": "fc_"}


def response_object(body: ResponsesBody, id: str, model: str, created: int) -> Object:
    """A response that has not begun."""
    builtins = msgspec.to_builtins
    form = {"type": "text"}
    if body.text is not None and body.text.format is not None:
        given = builtins(body.text.format)
        form = {k: v for k, v in given.items() if v is not None}
    reasoning, verbosity = body.reasoning, (body.text and body.text.verbosity) or "medium"
    return {
        "id": id, "object": "response", "created_at": created, "status": "queued",
        "background": bool(body.background), "error": None, "incomplete_details": None,
        "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {}, "model": model, "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "service_tier": "default", "store": body.store is not False,
        "temperature": body.temperature, "text": {"format": form, "verbosity": verbosity},
        "tool_choice": builtins(body.tool_choice or "auto"),
        "tools": [_tool(builtins(t)) for t in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0, "top_p": body.top_p,
        "truncation": "disabled", "usage": None, "user": None,
    }  # fmt: skip


def _tool(given: Object) -> Object:
    return given | {"strict": bool(given["strict"])}


def input_items(body: ResponsesBody) -> list[Object]:
    """An input as it is kept: every item has an id of its own, and content is a list."""
    given = body.input
    read_items(given)
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    out, ids = [], set[str]()
    for item in items:
        made = {"type": "message", **item}
        if not made.get("id") or made["id"] in ids:
            made["id"] = f"{PREFIXES[made['type']]}_{secrets.token_hex(12)}"
        ids.add(made["id"])
        if isinstance(made.get("content"), str):
            kind = "output_text" if made["role"] == "assistant" else "input_text"
            part: Object = {"type": kind, "text": made["content"]}
            made["content"] = [part | ({"annotations": []} if kind == "output_text" else {})]
        out.append(made)
    return out


def failed(response: Object, error: RequestError) -> Object:
    """A response that ended with an error."""
    code = "server_error" if error.status >= 500 else "invalid_prompt"
    return response | {"status": "failed", "error": {"code": code, "message": str(error)}}


class ItemsWriter:
    """Writes a response. See `dialect`. response: what it is so far."""

    media_type = "text/event-stream; charset=utf-8"

    def __init__(self, body: ResponsesBody, job: PreparedRequest, usage: Usage, id: str) -> None:
        self.stream = bool(body.stream)
        self._job, self._usage = job, usage
        begun = response_object(body, id, job.model.name, int(time.time()))
        params = job.params
        filled = {"temperature": params.temperature, "top_p": params.top_p}
        self.response = begun | filled | {"status": "in_progress"}
        self._scored = params.logprobs is not None
        self._blocks = Blocks()
        self._items: list[Object] = []
        self._tokens: list[list[TokenInfo]] = []  # of each item
        self._untold: list[TokenInfo] = []  # whose text is held back
        self._thoughts = 0  # tokens
        self._last: TextDelta | None = None
        self._number = 0  # of the next event

    # -- events -------------------------------------------------------------------------------

    def _event(self, name: str, /, **fields: Any) -> bytes:
        value = {"type": f"response.{name}", "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: response.%b\ndata: %b\n\n" % (name.encode(), encode(value))

    def opening(self) -> bytes:
        return self._event("created", response=self.response) + self._event(
            "in_progress", response=self.response
        )

    def chunks(self, delta: TextDelta) -> bytes:
        """The events of a delta: items that begin, grow and end."""
        self._untold += delta.tokens
        if not delta.text and (delta.reasoning or delta.calls):
            self._untold = []  # they are of what is no text
        out = b"".join(map(self._change, self._blocks.push(delta)))
        if delta.reasoning and not delta.text:
            self._thoughts += len(delta.ids)
        if delta.finish:
            self._last = delta
        return out

    def _change(self, change: Change) -> bytes:
        if change.step == "open":
            return self._open(change.block)
        item, place = self._items[-1], {"output_index": change.block.index}
        place |= {"item_id": item["id"]}
        name = {"thoughts": "reasoning_text", "text": "output_text"}.get(change.block.kind)
        if change.step == "close":
            return self._close(change.block, name, place)
        if name is None:
            return self._event("function_call_arguments.delta", delta=change.text, **place)
        fields: Object = {"content_index": 0, "delta": change.text, **place}
        if name == "output_text":
            fields["logprobs"] = self._logprobs(self._tell(change.text))
        return self._event(f"{name}.delta", **fields)

    def _tell(self, text: str) -> list[TokenInfo]:
        """Takes the tokens of new text that have come since the last time. Those before the first
        text may be of what is not shown, such as markers: the last that can hold it are its."""
        told, self._untold = self._untold, []
        if not self._tokens[-1]:
            missing, first = len(text.encode()), len(told)
            while missing > 0 and first > 0:
                first -= 1
                missing -= len(self._job.model.tokenizer.spelled(told[first].token))
            told = told[first:]
        self._tokens[-1] += told
        return told

    def _open(self, block: Block) -> bytes:
        item: Object = {"id": PREFIX[block.kind] + secrets.token_hex(12), "status": "in_progress"}
        part: Object | None = None
        match block.kind:
            case "thoughts":
                item |= {"type": "reasoning", "summary": [], "content": []}
                part = {"type": "reasoning_text", "text": ""}
            case "text":
                item |= {"type": "message", "role": "assistant", "content": []}
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            case _:
                item |= {"type": "function_call", "call_id": block.id, "name": block.name,
                         "arguments": ""}  # fmt: skip
        self._items.append(item)
        self._tokens.append([])
        out = self._event("output_item.added", output_index=block.index, item=item)
        if part is not None:
            place = {"item_id": item["id"], "output_index": block.index, "content_index": 0}
            out += self._event("content_part.added", part=part, **place)
        return out

    def _close(self, block: Block, name: str | None, place: Object) -> bytes:
        item = self._items[-1] | {"status": "completed"}
        if name is None:
            item["arguments"] = block.text
            done = {"arguments": block.text, "name": block.name, **place}
            out = self._event("function_call_arguments.done", **done)
        else:
            part: Object = {"type": name, "text": block.text}
            text: Object = {"text": block.text, "content_index": 0, **place}
            if name == "output_text":
                self._untold = []  # nothing of them is shown
                scored = self._logprobs(self._tokens[-1])
                part |= {"annotations": [], "logprobs": scored}
                text["logprobs"] = scored
            item["content"] = [part]
            out = self._event(f"{name}.done", **text)
            out += self._event("content_part.done", part=part, content_index=0, **place)
        self._items[-1] = item
        return out + self._event("output_item.done", output_index=block.index, item=item)

    def _logprobs(self, tokens: list[TokenInfo]) -> list[Any]:
        if not self._scored:
            return []
        content: list[Any] = chat_logprobs(self._job.model.tokenizer, tokens, False)["content"]
        return content

    def closing(self) -> bytes:
        self._finish()
        return self._event(str(self.response["status"]), response=self.response)

    def failure(self, error: RequestError) -> bytes:
        self.response = failed(self.response, error) | {"output": self._items}
        return self._event("failed", response=self.response)

    # -- the whole ----------------------------------------------------------------------------

    def _finish(self) -> None:
        cut = self._last is not None and self._last.finish == "length"
        if cut and self._items:
            self._items[-1] = self._items[-1] | {"status": "incomplete"}
        usage = self._usage
        self.response |= {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items,
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": self._thoughts},
                "total_tokens": usage.prompt + usage.completion,
            },
        }

    def whole(self, choices: Sequence[Sequence[TextDelta]]) -> bytes:
        """The response of a request that does not stream."""
        for delta in choices[0]:
            self.chunks(delta)
        self._finish()
        return encode(self.response)
