"""Evidence that the mean of values >= 0 lies above a limit, which may be read after every one.

Somebody bets against the limit m: with the part f of the money, a value x multiplies it by
1 + f (x / m - 1). If the mean is at most m, no bet gains on average, so the money exceeds 1 / alpha
at any time with a probability of at most alpha (Ville). Nothing else is assumed of the values.
A first coin is shared among all parts FRACTIONS; for values of 0 and 1 that is the mixture of
likelihood ratios of the rates m + f (1 - m) against m.
Logarithms of money add up, so what several gateways have seen is one array per gateway, summed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]

# From "a fifth of a percent more than a limit of 1 %" to "everything": what is worth noticing.
FRACTIONS: Floats = np.geomspace(0.002, 0.95, 24)


def gains(value: Floats | float, limit: Floats | float) -> Floats:
    """What a value adds to the logarithm of each share of the money, on a last axis."""
    ratio = np.asarray(value, np.float64) / limit - 1.0
    return np.log1p(FRACTIONS * ratio[..., None])


def evidence(logs: Floats) -> Floats:
    """The logarithm of all the money, from that of each share (last axis), which starts at 0."""
    highest = logs.max(axis=-1)
    rest = np.exp(logs - highest[..., None]).mean(axis=-1)
    found: Floats = highest + np.log(rest)
    return found


FIRST = 0.8  # of all the money begins to bet at once


def since_any_time(logs: Floats) -> float:
    """The evidence of money of which a part waits for each later time, so that what was sound for
    long and then breaks is noticed too. logs: the evidence from each time on, the first first.

    The k-th later time gets 1 / k (k + 1) of what does not begin at once.
    """
    later = np.arange(1, len(logs))
    parts = np.concatenate(([FIRST], (1 - FIRST) / (later * (later + 1))))
    waiting = (1 - FIRST) / max(1, len(logs))
    return float(np.logaddexp(np.logaddexp.reduce(np.log(parts) + logs), math.log(waiting)))
