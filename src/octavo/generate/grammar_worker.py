"""Makes grammars of structures and compiles them, before an engine gets to see them.

Run as `python -m octavo.generate.grammar_worker`; see octavo.sandbox.worker.
"""

from __future__ import annotations

import msgspec

from octavo.engine.constraint import GrammarCompiler, TokenTable
from octavo.errors import RequestError
from octavo.sandbox.worker import Handler, serve
from octavo.text.grammar import from_choice
from octavo.text.structure import Structure


class GrammarVocabulary(msgspec.Struct, frozen=True):
    """What the worker is started with. size: tokens of the model."""

    table: TokenTable
    size: int


class Verdict(msgspec.Struct, frozen=True):
    """A structure's grammar, or what is wrong with it and with which field."""

    grammar: str = ""
    wrong: str = ""
    param: str | None = None
    code: str | None = None


def prepare(about: bytes) -> Handler:
    vocabulary = msgspec.msgpack.decode(about, type=GrammarVocabulary)
    compiler = GrammarCompiler(vocabulary.table, vocabulary.size)
    compiler.check(from_choice(["a"]))  # reads the vocabulary

    def handle(task: bytes) -> bytes:
        try:
            grammar = Structure.decode(task).lark()
            compiler.check(grammar)
            verdict = Verdict(grammar)
        except RequestError as e:
            verdict = Verdict(wrong=str(e), param=e.param, code=e.code)
        except RecursionError:
            verdict = Verdict(wrong="the schema nests too deeply", code="invalid_grammar")
        return msgspec.msgpack.encode(verdict)

    return handle


if __name__ == "__main__":
    serve(prepare)
