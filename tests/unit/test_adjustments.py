"""What biases, penalties and banned tokens do to logits is kept from token to token; it equals what
is found anew from the whole text."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.request import SamplingParams
from octavo.engine.sampling_state import Adjustment, SamplingState

TOKENS = st.integers(0, 9)
PENALTY = st.sampled_from([0.0, 0.5, -1.0])
PARAMS = st.builds(
    SamplingParams,
    presence_penalty=PENALTY,
    frequency_penalty=PENALTY,
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.5]),
    logit_bias=st.dictionaries(TOKENS, st.sampled_from([2.0, -100.0]), max_size=3),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.lists(TOKENS, max_size=2),
    bad_words=st.lists(st.lists(TOKENS, min_size=1, max_size=2), max_size=2),
)


def anew(params: SamplingParams, prompt: list[int], text: list[int]) -> dict[int, Adjustment]:
    """Slowly, from the formulas of OpenAI's API (addends) and of the CTRL paper (repetition)."""
    counts, found = Counter(text), {}
    banned = set(params.stop_token_ids) if len(text) < params.min_tokens else set()
    for *head, last in params.bad_words:
        if len(head) <= len(text) and text[len(text) - len(head) :] == head:
            banned.add(last)
    for token in range(10):
        add = params.logit_bias.get(token, 0.0) - params.frequency_penalty * counts[token]
        add -= params.presence_penalty * (token in counts)
        repetition = params.repetition_penalty if token in prompt + text else 1.0
        if token in banned:
            found[token] = (token, -math.inf, 1.0)
        elif (add, repetition) != (0.0, 1.0):
            found[token] = (token, add, repetition)
    return found


def kept(state: SamplingState) -> dict[int, Adjustment]:
    """Of a state, without those that change nothing."""
    rows = state.row().adjustments
    assert len({token for token, _, _ in rows}) == len(rows)
    return {row[0]: row for row in rows if row[1:] != (0.0, 1.0)}


@given(
    PARAMS, st.lists(TOKENS, max_size=4), st.lists(st.tuples(TOKENS, st.booleans()), max_size=12)
)
def test_kept_from_token_to_token(
    params: SamplingParams, prompt: list[int], text: list[tuple[int, bool]]
) -> None:
    state = SamplingState(params, list(prompt), len(prompt), 10)
    said: list[int] = []
    for token, forks in text:
        if forks:  # what becomes of the copy is no business of the original
            copy = state.fork(list(state.tokens))
            copy.tokens.append(token)
            copy.push(token)
            assert kept(copy) == anew(params, prompt, [*said, token])
        assert kept(state) == anew(params, prompt, said)
        state.tokens.append(token)
        state.push(token)
        said.append(token)
    assert kept(state) == anew(params, prompt, said)
