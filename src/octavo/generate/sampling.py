"""What a request says of sampling, as an engine takes it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import msgspec

from octavo.engine.request import MAX_BIAS, SamplingParams
from octavo.errors import InvalidValue
from octavo.generate.model import ServedModel
from octavo.generate.request import Sampling
from octavo.text import Tokenizer

MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_BAD_WORDS = 128


def sampling_params(given: Sampling | SamplingParams, model: ServedModel) -> SamplingParams:
    """Parameters of a request: its own, else the model's defaults. A missing seed is drawn here."""
    if isinstance(given, Sampling):
        values = {f.name: getattr(given, f.name) for f in fields(given)}
        own = {name: value for name, value in values.items() if value is not None}
        own |= {
            "max_tokens": given.max_tokens,
            "beam": given.beam,
            "stop": _stops(given.stop),
            "logit_bias": _biases(given.logit_bias, model.vocabulary),
            "bad_words": _bad_words(given.bad_words, model.tokenizer),
            "logprobs": given.logprobs,
        }
        defaults = SamplingParams(temperature=0) if given.beam is not None else model.defaults
        given = msgspec.structs.replace(defaults, **own)
    if given.seed is None:
        given = msgspec.structs.replace(given, seed=secrets.randbits(62))
    return given


def _stops(stop: str | Sequence[str] | None) -> list[str]:
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    if len(stops) > MAX_STOPS or any(not 1 <= len(s) <= MAX_STOP_LENGTH for s in stops):
        raise InvalidValue(
            f"stop takes up to {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters", "stop"
        )
    return stops


def _biases(biases: Mapping[str, Any] | None, vocabulary: int) -> dict[int, float]:
    given = biases or {}
    if len(given) > MAX_BIAS:
        raise InvalidValue(
            f"logit_bias has {len(given):,} entries; {MAX_BIAS:,} at most", "logit_bias"
        )
    out = {}
    for key, bias in given.items():
        at = f"logit_bias[{key[:32]!r}]"
        number = key.isascii() and key.isdigit() and len(key) < 16
        if not number or not 0 <= int(key) < vocabulary:
            raise InvalidValue(f"{at}: keys are token ids, 0 to {vocabulary - 1}", "logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise InvalidValue(f"{at} must be a number between -100 and 100", "logit_bias")
        out[int(key)] = float(bias)
    return out


def _bad_words(words: Sequence[str] | None, tokenizer: Tokenizer) -> list[list[int]]:
    """Each word as it is tokenized at the beginning of a text and after a space."""
    given = words or ()
    if len(given) > MAX_BAD_WORDS or any(not 1 <= len(w) <= MAX_STOP_LENGTH for w in given):
        raise InvalidValue(
            f"bad_words takes up to {MAX_BAD_WORDS} texts of 1 to {MAX_STOP_LENGTH} characters",
            "bad_words",
        )
    out: list[list[int]] = []
    for word in given:
        forms = [tokenizer.encode(w, add_bos=False) for w in (word, " " + word.lstrip())]
        out += [ids for ids in forms if ids and ids not in out]
    return out
