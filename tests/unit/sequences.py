"""Sequences as an engine has them, without one."""

from __future__ import annotations

from octavo.engine.kv import KVState
from octavo.engine.request import Request, SamplingParams
from octavo.engine.sampling_state import SamplingState
from octavo.engine.sequence import Sequence


def sequence(prompt: list[int], reply: list[int], salt: str = "", **fields: object) -> Sequence:
    request = Request(id="a", prompt=prompt, params=SamplingParams(), salt=salt, **fields)  # type: ignore[arg-type]
    kv = KVState(list(prompt), salt)
    made = Sequence.of(
        request, 0, 0.0, 4096, kv, SamplingState(request.params, kv.tokens, len(prompt), 99), -1
    )
    for token in reply:
        made.append(token)
    return made
