"""How like two texts are: BLEU-4 as sacrebleu defines it, with its standard error, and ROUGE-L."""

from __future__ import annotations

import math
import re
from importlib import import_module
from types import ModuleType

from octavo.errors import UsageError

_WORD = re.compile(r"[^\W_]+")


def sacrebleu() -> ModuleType:
    """The library, which a plain installation lacks. Raises UsageError."""
    try:
        return import_module("sacrebleu")
    except ImportError:
        raise UsageError(
            "BLEU is computed by sacrebleu, which is not installed",
            'pip install "octavo[compress]"',
        ) from None


def bleu4(texts: list[str], references: list[str]) -> float:
    """BLEU-4 of all texts against one reference each, 0 to 100.

    Equal texts have 100, also those of fewer than four words, for which BLEU has no n-grams.
    """
    if texts == references:
        return 100.0
    return float(sacrebleu().corpus_bleu(texts, [references]).score)


def bleu4_error(texts: list[str], references: list[str]) -> float:
    """The standard error of `bleu4` over two texts or more, by the jackknife (Efron and Tibshirani,
    An Introduction to the Bootstrap, 1993, chapter 11): nothing is drawn, so it has no seed.
    """
    count = len(texts)
    left_out = [
        bleu4(texts[:i] + texts[i + 1 :], references[:i] + references[i + 1 :])
        for i in range(count)
    ]
    mean = sum(left_out) / count
    return math.sqrt((count - 1) / count * sum((x - mean) ** 2 for x in left_out))


def rouge_l(texts: list[str], references: list[str]) -> float:
    """The mean F-measure of the longest common subsequences of words, 0 to 1."""
    return sum(map(_rouge_l, texts, references)) / len(texts)


def _rouge_l(text: str, reference: str) -> float:
    x, y = _WORD.findall(text.lower()), _WORD.findall(reference.lower())
    if not x or not y:
        return float(x == y)
    row = [0] * (len(y) + 1)  # longest common subsequence of the words so far and y's beginnings
    for word in x:
        before = 0
        for j, other in enumerate(y, 1):
            above = row[j]
            row[j] = before + 1 if word == other else max(above, row[j - 1])
            before = above
    return 2 * row[-1] / (len(x) + len(y))
