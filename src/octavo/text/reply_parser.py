"""A model's reply taken apart as it comes: thoughts, content and tool calls.

Linear in the length of the text and without evaluating any of it: calls are found by their markers
and cut out of their JSON by a scanner that only knows strings and nesting.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from octavo.text.tools import THINK, THOUGHT, ToolFormat

NAME_LENGTH = 256
SPACE = 64  # characters of white space held back, at most
KEYS = {"name", "arguments", "parameters", "id", "type"}


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of tool call `index`: its beginning has an id and a name, the rest more arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Delta:
    """What a piece of text turned out to be."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class _Object:
    """Scans `{"name": ..., "arguments": {...}}`, keys in any order, for the name and the arguments.

    With a `name` from elsewhere the whole object is the arguments. `failed`: it is not a call.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.done = self.failed = False
        self.raw: list[str] = []
        self._whole = name is not None
        self._depth = 0
        self._string = self._escape = False
        self._key = ""
        self._after_colon = False
        self._token = ""  # the last string at depth 1
        self._arguments: list[str] = []  # not given out yet

    def push(self, text: str) -> tuple[str, str]:
        """(arguments this adds, text after the object)."""
        end = len(text)
        for i, c in enumerate(text):
            self._scan(c)
            if self.done or self.failed:
                end = i + 1
                break
        self.raw.append(text[:end])
        if self.name is None:
            return "", text[end:]
        out, self._arguments = "".join(self._arguments), []
        return out, text[end:]

    def _scan(self, c: str) -> None:
        inside = self._whole or (self._depth > 1 and self._value_is_arguments)
        if self._string:
            self._in_string(c)
        elif c == '"':
            self._string, self._token = True, ""
        elif c in "{[":
            self._depth += 1
            inside = inside or self._whole or (self._depth > 1 and self._value_is_arguments)
        elif c in "}]":
            self._depth -= 1
            self.done = self._depth == 0
            self.failed = self.done and self.name is None
        elif self._depth == 1 and c == ":" and not self._after_colon:
            self._key, self._after_colon = self._token, True
            self.failed = self.name is None and self._key not in KEYS
        elif self._depth == 1 and c == ",":
            self._after_colon = False
        if inside:
            self._arguments.append(c)

    @property
    def _value_is_arguments(self) -> bool:
        return self._after_colon and self._key in ("arguments", "parameters")

    def _in_string(self, c: str) -> None:
        if self._escape:
            self._escape = False
        elif c == "\\":
            self._escape = True
        elif c == '"':
            self._string = False
            if self._depth == 1 and self._after_colon and self._key == "name" and not self._whole:
                self.name = self._token
            return
        if self._depth == 1 and len(self._token) <= NAME_LENGTH:
            self._token += c


class ReplyParser:
    """Splits one reply. thinking: whether the prompt left the model inside its thoughts.

    tools: how calls are written, None when none are expected; reasoning: whether thoughts are told
    apart from content.
    """

    def __init__(self, tools: ToolFormat | None, reasoning: bool, thinking: bool) -> None:
        self._format = tools
        self._held = ""  # might be the beginning of a marker, or white space before one
        self._state = "think" if thinking and reasoning else "start" if reasoning else "text"
        self._object: _Object | None = None
        self._announced = False  # the call being read
        self._bare = False  # it has no arguments yet
        self._skipped = ""  # since content ended: content after all if no call begins
        self._started = False  # some content has been shown
        self.calls = 0

    def push(self, text: str) -> Delta:
        """What `text` adds."""
        out = Delta()
        rest = self._held + text
        self._held = ""
        while rest:
            before, state = rest, self._state
            rest = getattr(self, f"_{self._state}")(rest, out)
            if rest == before and self._state == state:
                self._held = rest
                break
        return out

    def finish(self) -> Delta:
        """What is left when the reply ends."""
        out = Delta()
        held, self._held = self._held, ""
        if self._object is not None and self._object.name is None:
            held = "".join(self._object.raw) + held
        if self._state == "think":
            out.reasoning = held
        elif self._skipped or (self._state != "between" and (held.strip() or not self.calls)):
            out.content = self._skipped + held
        return out

    # -- states: each takes text from the front and returns what is left; unchanged: needs more ----

    def _start(self, text: str, out: Delta) -> str:
        """Before anything: thoughts may be opened by the model itself."""
        stripped = text.lstrip()
        if stripped.startswith(THINK):
            self._state = "think"
            return stripped[len(THINK) :]
        if THINK.startswith(stripped) and len(text) < SPACE:
            return text
        self._state = "text"
        return text

    def _think(self, text: str, out: Delta) -> str:
        at = text.find(THOUGHT)
        if at >= 0:
            out.reasoning += text[:at].rstrip("\n")
            self._state = "after"
            return text[at + len(THOUGHT) :]
        keep = max(_overlap(text, THOUGHT), _overlap(text, "\n" + THOUGHT))
        keep = max(keep, min(len(text) - len(text.rstrip("\n")), SPACE))
        out.reasoning += text[: len(text) - keep]
        return text[len(text) - keep :]

    def _after(self, text: str, out: Delta) -> str:
        """White space between thoughts and content belongs to neither."""
        stripped = text.lstrip()
        if stripped:
            self._state = "text"
        return stripped

    def _text(self, text: str, out: Delta) -> str:
        if self._format is None:
            out.content += text
            return ""
        found = [(at, -len(m), m) for m in self._format.openings if (at := text.find(m)) >= 0]
        if found:
            at, _, marker = min(found)
            before = text[:at].rstrip()
            self._content(before, out)
            self._skipped = text[len(before) : at + len(marker)]
            self._state = "between"
            return text[at + len(marker) :]
        if self._format.bare and not self._started:
            stripped = text.lstrip()
            if not stripped and len(text) < SPACE:
                return text
            if stripped.startswith("{"):
                self._skipped = text[: len(text) - len(stripped)]
                self._state = "between"
                return stripped
        marker_length = max(_overlap(text, m) for m in self._format.openings)
        body = text[: len(text) - marker_length]
        space = min(len(body) - len(body.rstrip()), SPACE)
        self._content(body[: len(body) - space], out)
        return text[len(body) - space :]

    def _content(self, text: str, out: Delta) -> None:
        out.content += text
        self._started = self._started or bool(text.strip())

    def _between(self, text: str, out: Delta) -> str:
        """Around the objects of calls: separators and markers are dropped."""
        assert self._format is not None
        rest = text.lstrip(" \t\r\n,;")
        markers = (*self._format.openings, *self._format.closings)
        if len(self._skipped) > 4 * SPACE:
            return self._no_call(text, out)
        for marker in markers:
            if rest.startswith(marker):
                if marker in self._format.openings and self._skipped:
                    return self._no_call(text, out)
                self._skip(text[: len(text) - len(rest)] + marker)
                if marker in self._format.closings:
                    self._state = "text"
                return rest[len(marker) :]
        if any(m.startswith(rest) for m in markers) and len(text) < SPACE:
            return text
        self._skip(text[: len(text) - len(rest)])
        if not rest:
            return ""
        if rest[0] in "[]":
            self._skip(rest[0])
            return rest[1:]
        if rest[0] == "{":
            self._object, self._announced, self._state = _Object(), False, "call"
            return rest
        if self._format.named and (at := rest.find("{")) > 0:
            name = rest[:at].removesuffix("[ARGS]").strip()
            if name and len(name) <= NAME_LENGTH:
                self._object, self._announced, self._state = _Object(name), False, "call"
                return rest[at:]
        if self._format.named and at < 0 and len(rest) < NAME_LENGTH and "\n" not in rest:
            return rest
        return self._no_call(rest, out)

    def _skip(self, text: str) -> None:
        if self._skipped:
            self._skipped += text

    def _no_call(self, text: str, out: Delta) -> str:
        """What was taken for the way to a call is content."""
        skipped, self._skipped, self._state = self._skipped, "", "text"
        self._content(skipped, out)
        self._started = self._started or bool(text)
        return text

    def _call(self, text: str, out: Delta) -> str:
        """Inside the object of a call."""
        assert self._object is not None
        scanner = self._object
        arguments, rest = scanner.push(text)
        if scanner.failed:  # JSON, but not a call
            self._object = None
            rest = self._no_call(rest, out)
            self._content("".join(scanner.raw), out)
            return rest
        if scanner.name is not None and not self._announced:
            self._announced = True
            self._skipped = ""
            self._bare = True
            out.calls.append(CallDelta(self.calls, "call_" + secrets.token_hex(12), scanner.name))
            self.calls += 1
        if arguments:
            self._bare = False
            out.calls.append(CallDelta(self.calls - 1, arguments=arguments))
        if scanner.done:
            if self._bare:
                out.calls.append(CallDelta(self.calls - 1, arguments="{}"))
            self._object, self._state = None, "between"
        return rest


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`."""
    for n in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:n]):
            return n
    return 0
