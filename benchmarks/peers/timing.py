"""How compare.py times a peer that can only be asked for whole generations."""

from __future__ import annotations

from collections.abc import Callable


def measure(
    seconds: Callable[[int, int, int], float], cases: dict[str, list[int]]
) -> dict[str, dict[str, float]]:
    """`seconds(streams, prompt, output)` generates and says how long it took. Prefill is a generation
    of one token; decoding is what a longer one takes beyond that."""
    results = {}
    for name, (streams, prompt, output) in cases.items():
        seconds(streams, min(prompt, 64), 4)
        first = min(seconds(streams, prompt, 1) for _ in range(2))
        whole = seconds(streams, prompt, output)
        results[name] = {
            "prefill_tps": streams * prompt / first,
            "decode_tps": streams * (output - 1) / (whole - first),
        }
    return results
