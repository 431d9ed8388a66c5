"""Tool calls written as JSON objects, scanned while they are generated.

The scanner knows strings and nesting only, so that it can pass arguments on before they are
complete, exactly as the model wrote them. It evaluates nothing but arguments that are written as a
string, which are passed on when it ends.
"""

from __future__ import annotations

import json
from collections.abc import Collection

import msgspec

from octavo.text.messages import JsonObject

MAX_NAME = 256  # characters of a function's name
ARGUMENTS = frozenset(("arguments", "parameters"))
KEYS = ARGUMENTS | {"name", "id", "type"}


class ObjectScanner:
    """Follows one JSON object, a character at a time.

    depth: nesting after the last character; 0 when the object has ended. string: the last string at
    depth 1, with its escapes. key: the member whose value is being read, None before its colon.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self.string = ""
        self.key: str | None = None
        self._escaped = False

    def step(self, c: str) -> None:
        """Takes the next character."""
        if self.in_string:
            self._step_in_string(c)
        elif c == '"':
            self.in_string, self.string = True, ""
        elif c in "{[":
            self.depth += 1
        elif c in "}]":
            self.depth -= 1
        elif self.depth == 1 and c == ",":
            self.key = None
        elif self.depth == 1 and c == ":" and self.key is None:
            self.key = self.string

    def _step_in_string(self, c: str) -> None:
        if self._escaped:
            self._escaped = False
        elif c == "\\":
            self._escaped = True
        elif c == '"':
            self.in_string = False
            return
        if self.depth == 1 and len(self.string) <= MAX_NAME:
            self.string += c


class CallScanner:
    """Finds name and arguments in `{"name": ..., "arguments": {...}}`, keys in any order.

    Created with a name, it takes the whole object as the arguments. names: what may be called, None
    for anything. done: the object has ended. failed: it is no call.
    """

    def __init__(self, name: str | None = None, names: Collection[str] | None = None) -> None:
        self.name, self._names = name, names
        self.done = self.failed = False
        self._read: list[str] = []  # as long as it may be no call
        self._only_arguments = name is not None
        self._object = ObjectScanner()
        self._arguments: list[str] = []  # read but not returned
        self._quoted: list[str] = []  # of a string that may hold the arguments

    @property
    def text(self) -> str:
        """All that was read of what is no call."""
        return "".join(self._read)

    def push(self, text: str) -> tuple[str, int]:
        """(arguments that became known, how many characters of the text belong to the object)."""
        count = 0
        while count < len(text) and not (self.done or self.failed):
            self._step(text[count])
            count += 1
        if self.name is None:
            self._read.append(text[:count])
            return "", count
        arguments, self._arguments = "".join(self._arguments), []
        return arguments, count

    def _step(self, c: str) -> None:
        scan = self._object
        depth, key, in_string = scan.depth, scan.key, scan.in_string
        scan.step(c)
        if self._only_arguments or (key in ARGUMENTS and max(depth, scan.depth) > 1):
            self._arguments.append(c)
        elif key in ARGUMENTS and in_string:
            self._quoted.append(c)
            if not scan.in_string:
                self._arguments.append(_object_in("".join(self._quoted)))
                self._quoted = []
        elif key is None and scan.key is not None:
            self.failed = self.name is None and scan.key not in KEYS
        elif (
            in_string and not scan.in_string and depth == 1 and key == "name" and self.name is None
        ):
            self.failed = self._names is not None and scan.string not in self._names
            self.name = None if self.failed else scan.string
        if scan.depth == 0:
            self.done = True
            self.failed = self.name is None


def _object_in(string: str) -> str:
    """The JSON object that a string holds, as it is written there; empty if it holds none.

    string: with its escapes and the quotation mark at its end.
    """
    try:
        text = json.loads(f'"{string}', strict=False)
        msgspec.json.decode(text, type=JsonObject)
    except (ValueError, RecursionError):
        return ""
    return str(text)
