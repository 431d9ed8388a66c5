"""How far two versions are apart, by log-probabilities of the likeliest tokens that each tells."""

from __future__ import annotations

import math
from collections.abc import Mapping

ROUNDING = 1e-5  # of probabilities that were summed up and sent


def token_kl(old: Mapping[int, float], new: Mapping[int, float]) -> float:
    """KL divergence of the next token, in nats, that two versions have at least: old || new.

    old, new: log-probabilities by token id, of the most likely tokens. Tokens that not both tell
    of are taken as one, which never makes the divergence larger (data-processing inequality).
    """
    common = old.keys() & new.keys()
    found = sum(math.exp(old[t]) * (old[t] - new[t]) for t in common)
    rest = max(0.0, 1 - sum(math.exp(old[t]) for t in common))
    others = max(0.0, 1 - sum(math.exp(new[t]) for t in common)) + ROUNDING
    return max(0.0, found + (rest * math.log(rest / others) if rest else 0.0))
