"""A process that compiles grammars before an engine gets to see them, and can be killed.

Run as `python -m octavo.server.grammar_worker`. Reads frames from standard input: a vocabulary,
then grammars; answers each grammar with what is wrong with it, or nothing.
"""

from __future__ import annotations

import resource
import sys

import msgspec

from octavo.engine.constraint import GrammarCompiler, TokenTable
from octavo.errors import RequestError

HEADER = 4
MEMORY = 4 << 30  # address space


class Vocabulary(msgspec.Struct, frozen=True):
    """The first frame. size: tokens of the model."""

    table: TokenTable
    size: int


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(HEADER, "little") + body


def _read() -> bytes:
    header = sys.stdin.buffer.read(HEADER)
    if len(header) < HEADER:
        raise EOFError
    return sys.stdin.buffer.read(int.from_bytes(header, "little"))


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        start = msgspec.msgpack.decode(_read(), type=Vocabulary)
        compiler = GrammarCompiler(start.table, start.size)
        while True:
            wrong = ""
            try:
                compiler.check(_read().decode())
            except RequestError as e:
                wrong = str(e)
            sys.stdout.buffer.write(frame(wrong.encode()))
            sys.stdout.buffer.flush()
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass  # the server is gone


if __name__ == "__main__":
    main()
