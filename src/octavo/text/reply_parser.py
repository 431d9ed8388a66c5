"""Splits a chat reply into thoughts, content and tool calls while it is generated.

The parsers below are coroutines that read from one `_Stream`: each runs as far as the text allows
and yields when it needs more. A reply gives the same result in whatever pieces it comes. Text that
may still belong to a marker is held back; how much is bounded, so the work is linear in its length.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass, field

from octavo.text.call_scanner import MAX_NAME, CallScanner
from octavo.text.stop_strings import first_match, partial_match
from octavo.text.tools import THINK, THOUGHT, ToolFormat

MAX_SPACE = 64  # characters of white space held back before a marker
MAX_PREAMBLE = 256  # characters held back between a marker and the call that may follow
SEPARATORS = " \t\r\n,;"


@dataclass(frozen=True, slots=True)
class CallDelta:
    """New text of tool call number `index`. The first has its id and name, the rest arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Delta:
    """What is new in a reply."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class ReplyParser:
    """Splits one reply.

    tools: how the model writes calls, None if it may make none. reasoning: whether to look for
    thoughts. thinking: whether the prompt ended within thoughts. names: of functions, None for any:
    in formats that need no marker, JSON that names no such function is content. calls: number of
    calls so far.
    """

    def __init__(
        self, tools: ToolFormat | None, reasoning: bool, thinking: bool,
        names: Collection[str] | None = None,
    ) -> None:  # fmt: skip
        self._stream = _Stream(names if tools is not None and tools.bare else None)
        self._parser = _parse_reply(self._stream, tools, reasoning, thinking and reasoning)

    @property
    def calls(self) -> int:
        return self._stream.calls

    def push(self, text: str) -> Delta:
        """What `text` adds."""
        self._stream.text += text
        return self._advance()

    def finish(self) -> Delta:
        """What is left when the reply ends."""
        self._stream.ended = True
        return self._advance()

    def _advance(self) -> Delta:
        next(self._parser, None)
        delta, self._stream.delta = self._stream.delta, Delta()
        return delta


@dataclass(slots=True)
class _Stream:
    """The text to parse, and what was found in it.

    names: what may be called, None for anything. text: received, not parsed. ended: no more will
    come. preamble: parsed, and content if no call follows. delta: found since the last `push`.
    calls: begun so far. shown: any content was found.
    """

    names: Collection[str] | None
    text: str = ""
    ended: bool = False
    preamble: str = ""
    delta: Delta = field(default_factory=Delta)
    calls: int = 0
    shown: bool = False

    def take(self, count: int) -> str:
        taken, self.text = self.text[:count], self.text[count:]
        return taken

    def content(self, text: str) -> None:
        self.delta.content += text
        self.shown = self.shown or bool(text.strip())

    def skip(self, count: int) -> None:
        """Takes text on the way to a call."""
        skipped = self.take(count)
        if self.preamble:
            self.preamble += skipped

    def no_call(self, text: str = "") -> None:
        """The preamble and `text` after it were content."""
        self.content(self.preamble + text)
        self.preamble = ""

    def call(self, name: str) -> None:
        """A call has begun."""
        self.delta.calls.append(CallDelta(self.calls, "call_" + secrets.token_hex(12), name))
        self.calls += 1
        self.preamble = ""

    def arguments(self, text: str) -> None:
        self.delta.calls.append(CallDelta(self.calls - 1, arguments=text))


def _parse_reply(
    s: _Stream, tools: ToolFormat | None, reasoning: bool, thinking: bool
) -> Iterator[None]:
    if reasoning and (thinking or (yield from _parse_think(s))):
        yield from _parse_thoughts(s)
    if tools is None:
        while True:
            s.content(s.take(len(s.text)))
            yield
    while (yield from _parse_content(s, tools)):
        yield from _parse_calls(s, tools)


def _parse_think(s: _Stream) -> Generator[None, None, bool]:
    """The marker that opens thoughts. Returns whether the reply begins with it."""
    while True:
        space = len(s.text) - len(s.text.lstrip())
        rest = s.text[space:]
        if space <= MAX_SPACE and rest.startswith(THINK):
            s.take(space + len(THINK))
            return True
        if s.ended or space > MAX_SPACE or not THINK.startswith(rest):
            return False
        yield


def _parse_thoughts(s: _Stream) -> Iterator[None]:
    """Thoughts, the marker that closes them and the white space after it."""
    while (at := s.text.find(THOUGHT)) < 0 and not s.ended:
        body = len(s.text) - partial_match(s.text, (THOUGHT,))
        s.delta.reasoning += s.take(_length_before_space(s.text[:body], "\n"))
        yield
    if at < 0:
        s.delta.reasoning += s.take(len(s.text))
        return
    thoughts = s.take(at)
    s.delta.reasoning += thoughts[: _length_before_space(thoughts, "\n")]
    s.take(len(THOUGHT))
    while not (rest := s.text.lstrip()) and not s.ended:
        s.text = ""
        yield
    s.text = rest


def _parse_content(s: _Stream, style: ToolFormat) -> Generator[None, None, bool]:
    """Content, up to where a call may begin. Returns False if the reply ends first."""
    while True:
        begins = s.text.lstrip()
        if style.bare and not s.shown and begins.startswith("{"):
            found: tuple[int, str] | None = (len(s.text) - len(begins), "")
        else:
            found = first_match(s.text, style.openings)
        if found is not None:
            at, marker = found
            before = _length_before_space(s.text[:at])
            s.content(s.take(before))
            s.preamble = s.take(at - before + len(marker))
            return True
        if s.ended:
            rest = s.take(len(s.text))
            if rest.strip() or not s.calls:
                s.content(rest)
            return False
        body = len(s.text) - partial_match(s.text, style.openings)
        s.content(s.take(_length_before_space(s.text[:body])))
        yield


def _parse_calls(s: _Stream, style: ToolFormat) -> Iterator[None]:
    """Calls, one after another. Separators, brackets and markers around them are dropped."""
    markers = (*style.openings, *style.closings)
    while True:
        space = len(s.text) - len(s.text.lstrip(SEPARATORS))
        if not s.preamble:
            s.take(space)
            space = 0
        rest = s.text[space:]
        undecided = any(m.startswith(rest) and m != rest for m in markers)
        marker = max((m for m in markers if rest.startswith(m)), key=len, default="")
        heading, brace, _ = rest.partition("{")
        may_be_name = style.named and len(heading) < MAX_NAME and "\n" not in heading
        name = heading.removesuffix("[ARGS]").partition("[CALL_ID]")[0].strip()
        if len(s.preamble) + space > MAX_PREAMBLE:
            break
        if undecided:
            if s.ended:
                break
            yield
        elif marker:
            if s.preamble:
                break
            s.take(len(marker))
            if marker in style.closings:
                return
        elif rest[0] in "[]":
            s.skip(space + 1)
        elif may_be_name and not brace:
            if s.ended:
                break
            yield
        elif brace and (not heading or (may_be_name and name)):
            s.skip(space + len(heading))
            if not (yield from _parse_call(s, CallScanner(name or None, s.names))):
                return
        else:
            break
    rest = s.take(len(s.text)) if s.ended else ""
    s.no_call(rest if s.preamble else "")  # after a call, half a marker or a name is dropped


def _parse_call(s: _Stream, scanner: CallScanner) -> Generator[None, None, bool]:
    """The object of a call. Returns False if it is none."""
    first = s.calls
    empty = True
    while True:
        arguments, count = scanner.push(s.text)
        s.take(count)
        if scanner.failed or (s.ended and scanner.name is None):
            s.no_call(scanner.text)
            return False
        if scanner.name is not None and s.calls == first:
            s.call(scanner.name)
        if arguments:
            s.arguments(arguments)
            empty = False
        if scanner.done and empty:
            s.arguments("{}")
        if scanner.done or s.ended:
            return True
        yield


def _length_before_space(text: str, space: str | None = None) -> int:
    """Length of the text without the white space at its end, of which 64 characters count."""
    return len(text) - min(len(text) - len(text.rstrip(space)), MAX_SPACE)
