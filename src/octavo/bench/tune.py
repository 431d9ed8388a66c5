"""Finds the parts of a model's layers that drafts can do without, for self-speculation.

Each part is left out alone, and the share of tokens is counted that stay the same; then they are
left out one after the other, the least missed first, and of the sets on that way the one is taken
with which most tokens a second are expected.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np

from octavo.backends.base import BLOCK, Executable
from octavo.bench.speculation import GREEDY, TABLE
from octavo.engine.limits import MAX_DRAFT
from octavo.engine.loader import load_executable
from octavo.engine.open import open_model
from octavo.engine.plan import make_plan
from octavo.engine.runner import DraftSpan, draft_input
from octavo.engine.tuned import Tuned, write_tuned
from octavo.errors import Unsupported
from octavo.text import load_tokenizer

TEXTS = (
    "A lighthouse is a tower that", "def read_lines(path):\n    ",
    f"The table again, line by line:\n{TABLE}\n\nThe table again, line by line:\n",
    "Dear Ada,\n\nthank you for your letter. I", '{"people": [{"name": "',
    "Question: Why is the sky blue?\nAnswer:",
)  # fmt: skip
WRITTEN = 32  # tokens of each text that are compared: rows of results of a step
LEAST = 0.4  # of tokens that have to stay the same
TIMED, REPEATS = 8, 5
StepBar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


class _Texts:
    """Texts that a model has written, with keys and values of what was before."""

    def __init__(self, executable: Executable, prompts: list[list[int]]) -> None:
        self._executable = executable
        self._texts: list[tuple[list[int], int, list[int]]] = []  # tokens, of the prompt, blocks
        free = 0
        for prompt in prompts:
            count = (len(prompt) + WRITTEN + MAX_DRAFT) // BLOCK + 1
            blocks, free = list(range(free, free + count)), free + count
            first = executable.step(draft_input([DraftSpan(blocks, 0, prompt, GREEDY)]))[0].token
            span = DraftSpan(blocks, len(prompt), [first], GREEDY)
            rounds = executable.decode(draft_input([span]), WRITTEN - 1, [[]])
            written = [first, *(samples[0].token for samples in rounds)]
            self._texts.append((prompt + written, len(prompt), blocks))

    def agreement(self, skip: list[int]) -> float:
        """The share of tokens that a model without these parts draws too."""
        self._executable.skip(skip)
        right = 0
        for tokens, prompt, blocks in self._texts:
            step = draft_input([DraftSpan(blocks, prompt - 1, tokens[prompt - 1 : -1], None)])
            rows = np.arange(WRITTEN, dtype=np.int32)
            step = replace(step, logits_indices=rows, sampling=[GREEDY] * WRITTEN)
            (samples,) = self._executable.decode(step, 1, [], brief=True)
            right += sum(s.token == t for s, t in zip(samples, tokens[prompt:], strict=True))
        return right / (WRITTEN * len(self._texts))

    def seconds(self, rows: int = 1, brief: bool = False) -> float:
        """Of a step, the median of a few."""
        tokens, prompt, blocks = self._texts[0]
        span = DraftSpan(blocks, prompt, tokens[prompt : prompt + rows], GREEDY)
        step, steps = draft_input([span]), TIMED if rows == 1 else 1
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            self._executable.decode(step, steps, [[]], brief=brief)
            times.append((time.perf_counter() - began) / steps)
        return statistics.median(times)


def expected_gain(agreement: float, cost: float, verify: Callable[[int], float]) -> float:
    """Tokens a second against plain steps, with drafts as long as is best. cost: of a token of a
    draft, in steps; verify: what a step of so many rows takes, in steps."""
    best, expected, chain = 0.0, 1.0, 1.0
    for depth in range(1, MAX_DRAFT + 1):
        chain *= agreement
        expected += chain
        best = max(best, expected / (verify(depth + 1) + depth * cost))
    return best


def tune(path: Path, name: str, threads: int | None, progress: StepBar) -> tuple[Tuned, Path]:
    """What is found, and where it is kept. progress: opens a bar of so many steps.

    Raises Unsupported for a model without such parts.
    """
    model = open_model(path)
    if model.task != "generate":
        raise Unsupported(f"{name} generates no text")
    tokenizer = load_tokenizer(model.checkpoint)
    plan = make_plan(
        model.compiled, name=name, threads=threads, context=min(1024, model.program.context),
        memory="100%", encoder=model.encoder, speculation="off",
    )  # fmt: skip
    executable = load_executable(model, plan)
    while executable.pack_pending():
        pass
    if not executable.parts:
        raise Unsupported(f"{name} has no parts of layers that could be left out")
    texts = _Texts(executable, [tokenizer.encode(text) for text in TEXTS])
    with progress("Leaving out parts", 2 * executable.parts) as advance:
        tuned = _search(executable.parts, texts, advance)
    return tuned, write_tuned(model.checkpoint, tuned)


def _search(count: int, texts: _Texts, advance: Callable[[int], None]) -> Tuned:
    alone = []
    for part in range(count):
        alone.append(texts.agreement([part]))
        advance(1)
    plain = texts.seconds()
    rows = [1, 2, 4, 8, 16]
    times = [1.0, *(texts.seconds(n) / plain for n in rows[1:])]

    def verify(n: int) -> float:
        at = bisect_left(rows, n)
        share = (n - rows[at - 1]) / (rows[at] - rows[at - 1]) if at else 1.0
        return times[at] if not at else (1 - share) * times[at - 1] + share * times[at]

    skip: list[int] = []
    best = Tuned([], count, 1.0, 1.0, 0.0)
    for part in sorted(range(count), key=lambda i: -alone[i]):
        tried = [*skip, part]
        agreement = texts.agreement(tried)
        advance(1)
        if agreement < LEAST:
            continue
        skip = tried
        cost = texts.seconds(brief=True) / plain
        gain = expected_gain(agreement, cost, verify)
        if gain > best.gain:
            best = Tuned(sorted(skip), count, agreement, cost, gain)
    return best
