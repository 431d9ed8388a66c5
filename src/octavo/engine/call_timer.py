"""Times calls while somebody looks: a clock is put around methods, and taken off again.

What is timed so costs nothing before and after, for there is nothing left to ask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from threading import get_ident
from time import perf_counter_ns
from typing import Any

Label = str | Callable[..., str]  # or what makes one of the arguments
Call = tuple[Any, str, Label]  # an object, class or module; the function's name in it; its label
Timed = tuple[str, int, int]  # label, beginning and end by perf_counter_ns


class CallTimer:
    """Times calls of the thread that starts it, until `stop`. most: calls that are kept."""

    def __init__(self, calls: Iterable[Call], most: int) -> None:
        self._calls = list(calls)
        self._most = most
        self._before: list[tuple[Any, str, bool, Any]] = []
        self._timed: list[Timed] = []

    def start(self) -> None:
        self._timed = []
        for owner, name, label in self._calls:
            function, own = getattr(owner, name), name in vars(owner)
            self._before.append((owner, name, own, function))
            setattr(owner, name, self._clocked(function, label))

    def stop(self) -> list[Timed]:
        """What was timed, in the order in which it ended."""
        while self._before:
            owner, name, own, function = self._before.pop()
            if own:
                setattr(owner, name, function)
            else:
                delattr(owner, name)
        return self._timed

    def _clocked(self, function: Callable[..., Any], label: Label) -> Callable[..., Any]:
        timed, most, thread = self._timed, self._most, get_ident()

        @functools.wraps(function)
        def clocked(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != thread:
                return function(*args, **kwargs)
            began = perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                if len(timed) < most:
                    text = label if isinstance(label, str) else label(*args, **kwargs)
                    timed.append((text, began, perf_counter_ns()))

        return clocked
