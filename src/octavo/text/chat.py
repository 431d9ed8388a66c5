"""Chat templates: rendered in a sandboxed worker process, then encoded to token ids."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from octavo.checkpoint import Checkpoint
from octavo.checkpoint.files import read_file, read_json
from octavo.errors import RequestError
from octavo.sandbox.rendered import Rendered
from octavo.sandbox.worker import TooCostly, WorkerPool
from octavo.text.messages import (
    JsonObject,
    Message,
    Tool,
    message_variables,
    tool_variables,
    with_short_ids,
)
from octavo.text.tokenizer import Tokenizer
from octavo.text.tools import THINK, THOUGHT, format_of, without_tools

MAX_SOURCE = 256 << 10
SECONDS = 1.0  # of CPU time for a conversation
MEMORY = 512 << 20
WORKERS = 2  # so that one slow conversation does not hold up the next
Options = Mapping[str, Any]  # further values for a template, by the names it reads
ID_OF_NINE = re.compile(r"id['\"\]]* *\| *length *(!=|<) *9\b")  # Mistral's refuse other ids
ESCAPES = [chr(c) for c in range(0xFDD0, 0xFDF0)]  # noncharacters: never in exchanged text


@dataclass(frozen=True)
class Written:
    """A conversation as a template writes it. In what looks like a control token, but is not, the
    first character is followed by `escape`, which occurs nowhere else."""

    text: str
    escape: str

    @property
    def plain(self) -> str:
        """The text as its reader sees it."""
        return self.text.replace(self.escape, "")


class ChatTemplate:
    """Renders conversations. Raises RequestError when the template is at fault.

    source: its text. style: how the model writes tool calls. reasons: whether the model may write
    thoughts.
    """

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        if len(source) > MAX_SOURCE:
            raise RequestError(
                f"the chat template has {len(source)} characters; {MAX_SOURCE} at most"
            )
        self.source, self._tokenizer = source, tokenizer
        self.style = format_of(source)
        self.reasons = THOUGHT in source
        self._short_ids = ID_OF_NINE.search(source) is not None
        self._takes_parts = "'image'" in source or '"image"' in source
        self._workers = WorkerPool(
            "octavo.sandbox.templates", source.encode("utf-8", "replace"), seconds=SECONDS,
            count=WORKERS, memory=MEMORY,
        )  # fmt: skip
        self._workers.warm()

    @cached_property
    def variables(self) -> list[str]:
        """Names of the variables that the template reads."""
        return self._ask(b"").variables

    def check(self) -> None:
        """Raises RequestError for a template that cannot be compiled."""
        assert self.variables is not None

    def close(self) -> None:
        """Ends the worker processes; rendering raises EngineFailed from then on. They also end when
        the template is garbage collected."""
        self._workers.close()

    def _ask(self, task: bytes) -> Rendered:
        try:
            answer = self._workers.ask(task)
        except TooCostly as e:
            much = {"time": "does too much work"}.get(str(e), "takes too much memory")
            raise RequestError(f"the chat template {much}", "messages") from None
        rendered = msgspec.msgpack.decode(answer, type=Rendered)
        if rendered.invalid:
            raise RequestError(f"the chat template cannot be compiled: {rendered.invalid}")
        if rendered.refused:
            raise RequestError(f"the chat template refused: {rendered.refused}", "messages")
        if rendered.failed:
            raise RequestError(f"the chat template fails on this ({rendered.failed})", "messages")
        return rendered

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: Options | None = None,
    ) -> str:
        """The conversation as text, up to where the assistant speaks. Raises RequestError."""
        given = {"tools": [tool_variables(t) for t in tools] or None, **(options or {})}
        return self._render([message_variables(m) for m in messages], given)

    def _render(self, messages: list[JsonObject], options: JsonObject) -> str:
        special = self._tokenizer.special
        variables = {
            "add_generation_prompt": True,
            **options,
            "messages": messages,
            "bos_token": self._tokenizer.name(special.bos) if special.bos is not None else "",
            "eos_token": self._tokenizer.name(special.end) if special.end is not None else "",
        }
        return self._ask(_json(variables).encode()).text

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: Options | None = None,
        *,
        generation: bool = True,
        continued: bool = False,
        placeholders: Sequence[str] = (),
        media: Sequence[str] = (),
    ) -> list[int]:
        """Token ids of a conversation: those of what `write` makes of it."""
        written = self.write(
            messages, tools, options, generation=generation, continued=continued,
            placeholders=placeholders, media=media,
        )  # fmt: skip
        return self._tokenizer.encode_rendered(written.text, written.escape)

    def write(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: Options | None = None,
        *,
        generation: bool = True,
        continued: bool = False,
        placeholders: Sequence[str] = (),
        media: Sequence[str] = (),
    ) -> Written:
        """A conversation as text.

        options: further variables for the template. generation: open the assistant's reply at the
        end. continued: leave out the end of the last message, so that it can be continued.
        placeholders: what the template writes for a picture and for a video, and `media` what is
        put there instead; content goes to such a template in parts. One that takes only text shows
        each as a line of its own. Raises RequestError.
        Control tokens written by the template count; the same characters in a message stay text.
        Tools, calls and their results are written as text where the template knows nothing of them.
        """
        extra: JsonObject = {**(options or {}), "add_generation_prompt": generation}
        if "tools" in self.variables:
            extra["tools"] = [tool_variables(t) for t in tools] or None
        else:
            messages = without_tools(messages, tools, self.style)
        if self._short_ids:
            messages = with_short_ids(messages)
        parts = bool(placeholders) and self._takes_parts
        given = [[message_variables(m, parts) for m in messages], extra]
        everything = _json(given, ensure_ascii=False)
        unused = [c for c in ESCAPES if c not in everything]
        if len(unused) < 3:
            raise RequestError("the messages use every Unicode noncharacter", "messages")
        escape, mark, end = unused[:3]
        if placeholders and not parts:
            placeholders, given[0] = (mark,), [message_variables(m, mark=mark) for m in messages]
        shielded, extra = _map_text(given, lambda s: self._tokenizer.shield(s, escape))
        text = self._render(shielded, extra)
        if continued:
            marked = self._render([*shielded[:-1], _ending(shielded[-1], end)], extra)
            text = _left_open(text, marked.rpartition(end)[0])
        if placeholders:
            text = _with_media(text, placeholders, media)
        return Written(text, escape)

    def thinking(self, ids: list[int]) -> bool:
        """True if the prompt ends inside the model's thoughts."""
        saying = self._tokenizer.bytes_saying((THINK, THOUGHT))
        end = b"".join(saying[i] for i in ids[-8:]).decode("utf-8", "replace")
        return self.reasons and end.rstrip().endswith(THINK)


def _json(value: Any, ensure_ascii: bool = True) -> str:
    try:
        return json.dumps(value, ensure_ascii=ensure_ascii)
    except (RecursionError, ValueError):
        raise RequestError("the messages nest too deeply", "messages", "invalid_value") from None


def _with_media(text: str, placeholders: Sequence[str], media: Sequence[str]) -> str:
    """The rendered text with its pictures and videos. A message cannot write a placeholder: it is
    shielded."""
    between = re.split("|".join(map(re.escape, placeholders)), text)
    if len(between) != len(media) + 1:
        raise RequestError(
            f"the chat template shows {len(between) - 1} of {len(media)} images and videos",
            "messages", "invalid_value",
        )  # fmt: skip
    rest = zip(media, between[1:], strict=True)
    return between[0] + "".join(shown + after for shown, after in rest)


def _ending(message: dict[str, Any], end: str) -> dict[str, Any]:
    """A message whose text ends with `end`. Raises RequestError for one without a text."""
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [{"text": content}]
    if not (text := parts[-1].get("text", "")).strip():
        raise RequestError("the last message leaves nothing to continue", "continue_final_message")
    last = parts[-1] | {"text": text + end}
    return message | {"content": [*parts[:-1], last] if parts is content else last["text"]}


def _left_open(text: str, before: str) -> str:
    """The rendered text up to the end of the last message's content. before: what is before a mark
    at that end, white space too, which the template may leave out where there is no mark."""
    before = before if text.startswith(before) else before.rstrip()
    if not before or not text.startswith(before):
        raise RequestError("the last message leaves nothing to continue", "continue_final_message")
    return before


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_text(v, change) for v in value]
    if isinstance(value, dict):
        return {k: _map_text(v, change) for k, v in value.items()}
    return value


def template_source(checkpoint: Checkpoint) -> str | None:
    """The chat template stored in a checkpoint, None if there is none."""
    if checkpoint.format == "gguf":
        value = checkpoint.metadata.get("tokenizer.chat_template")
        return value if isinstance(value, str) else None
    if path := checkpoint.files.get("chat_template.jinja"):
        return read_file(path, 4 * MAX_SOURCE).decode("utf-8", "replace")
    if path := checkpoint.files.get("tokenizer_config.json"):
        value = read_json(path).get("chat_template")
        if isinstance(value, list):  # named templates
            named = {str(t.get("name")): t.get("template") for t in value if isinstance(t, dict)}
            value = named.get("default")
        return value if isinstance(value, str) else None
    return None
