"""Types of numbers as values of options: N in the help is a whole one, X any other."""

from __future__ import annotations

import sys
from typing import Any

import click

MAX_COUNT = (1 << 31) - 1  # more than any number of tokens, requests or seconds that makes sense
MOST = sys.float_info.max


class Number(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """A finite number from `low`, or `above` it, to `high`."""

    name, placeholder = "number", "X"

    def __init__(
        self, low: float | None = None, high: float | None = None, *, above: bool = False
    ) -> None:
        self.low, self.high, self._above = low, high, above

    def get_metavar(self, param: click.Parameter, ctx: Any = None) -> str | None:
        return self.placeholder if isinstance(param, click.Option) else None

    def parse(self, value: Any) -> float:
        return float(value)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            number = self.parse(value)
        except ValueError:
            self.fail(f"{value!r} is no {self.name}.", param, ctx)
        low = -MOST if self.low is None else self.low
        high = MOST if self.high is None else self.high
        if not low <= number <= high or (self._above and number == low):  # nan is nowhere
            self.fail(f"{value} is not {self._range()}.", param, ctx)
        return number

    def _range(self) -> str:
        if self.low is None:
            return "a finite number"
        least = f"a number {'above' if self._above else 'from'} {self.low}"
        return least if self.high is None else f"{least} to {self.high}"


class Count(Number):
    """A whole number."""

    name, placeholder = "whole number", "N"

    def parse(self, value: Any) -> int:
        return int(value)


def count(low: int = 1, high: int = MAX_COUNT) -> Count:
    """A whole number within a range."""
    return Count(low, high)
