"""An answer that was written beforehand, for when no upstream gives one."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.responses import Response

from octavo.gateway.body import RESUMABLE, Relayed
from octavo.server.http import EventStream, json_response

MARK = {"x-fallback": "prepared"}
USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
encode = msgspec.json.encode


def prepared(asked: Relayed, text: str) -> Response | None:
    """A text as the answer to a request, whole or as a stream; None for APIs other than OpenAI's
    chat and text completions."""
    if asked.path not in RESUMABLE:
        return None
    chat = asked.path == "/v1/chat/completions"
    kind = "chat.completion" if chat else "text_completion"
    about: dict[str, Any] = {
        "id": RESUMABLE[asked.path] + secrets.token_hex(12), "object": kind,
        "created": int(time.time()), "model": asked.outline.model,
    }  # fmt: skip
    if asked.stream:
        about["object"] = "chat.completion.chunk" if chat else kind
        delta = {"delta": {"role": "assistant", "content": text}} if chat else {"text": text}
        stream = EventStream(_frames(about, delta), "text/event-stream; charset=utf-8")
        stream.headers.update(MARK)
        return stream
    message = {"role": "assistant", "content": text, "refusal": None}
    said = {"message": message} if chat else {"text": text}
    body = about | {"choices": [_choice(said, "stop")], "usage": USAGE}
    return json_response(encode(body), headers=MARK)


def _choice(said: dict[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": 0, **said, "logprobs": None, "finish_reason": reason}


async def _frames(about: dict[str, Any], said: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    nothing: dict[str, Any] = {"delta": {}} if "delta" in said else {"text": ""}
    for choice in (_choice(said, None), _choice(nothing, "stop")):
        yield b"data: " + encode(about | {"choices": [choice]}) + b"\n\n"
    yield b"data: [DONE]\n\n"
