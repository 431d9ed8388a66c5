"""Sequences that wait until their grammars are compiled."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from octavo.engine.constraint import Constraint, GrammarCompiler
from octavo.engine.sequence import Sequence

IDLE_WAIT = 0.01  # seconds to wait for a grammar if nothing else is to be done


class GrammarQueue:
    """Compiles the grammars of sequences beside the steps."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._waiting: list[tuple[Sequence, Future[Any]]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence, grammar: str) -> None:
        """Starts to compile a sequence's grammar."""
        self._waiting.append((sequence, self._compiler.start(grammar)))

    def remove(self, sequence: Sequence) -> bool:
        """Removes a sequence. Returns False if it is not here."""
        before = len(self._waiting)
        self._waiting = [(s, f) for s, f in self._waiting if s is not sequence]
        return len(self._waiting) < before

    def take_ready(self, idle: bool) -> list[tuple[Sequence, Constraint | Exception]]:
        """Removes sequences whose grammars are compiled, or failed to; waits a moment if `idle`."""
        if idle and self._waiting:
            wait([f for _, f in self._waiting], IDLE_WAIT, FIRST_COMPLETED)
        done = [(s, f) for s, f in self._waiting if f.done()]
        self._waiting = [(s, f) for s, f in self._waiting if not f.done()]
        return [(sequence, self._result(future)) for sequence, future in done]

    def _result(self, future: Future[Any]) -> Constraint | Exception:
        try:
            return self._compiler.constraint(future)
        except Exception as e:
            return e
