"""Tokens that are drawn while drafts are verified have the model's distribution."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest

from octavo import _native
from octavo.backends.base import Floats
from octavo.checkpoint import open_checkpoint
from octavo.engine.kv import KVState
from octavo.engine.request import Request, SamplingParams
from octavo.engine.runner import run
from octavo.engine.sampling_state import SamplingState
from octavo.engine.scheduler import NOTHING, Draft, ScheduledSpan
from octavo.engine.sequence import Sequence
from octavo.text import load_tokenizer
from tests.conftest import real_text
from tests.property.test_exact import Pool, made

DRAWS = 100_000
SPANS, DEPTH, BLOCKS = 5, 2, 3  # fifteen rows with results a step
PROMPT = list(range(40, 70))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Pool:
    return made("llama", tmp_path_factory.mktemp("model"))


def distribution(pool: Pool, tokens: list[int], params: SamplingParams) -> Floats:
    """What follows `tokens`, computed from the logits of a step of their own in fp64."""
    executable = pool.executable(400, 2, "auto")
    kv = KVState(tokens, blocks=list(range(BLOCKS)))
    vocabulary = pool.lowered.program.vocabulary
    sampling = SamplingState(msgspec.structs.replace(params, temperature=0), tokens, 30, vocabulary)
    span = ScheduledSpan(Sequence.of(Request(id="a", prompt=tokens, params=params), 0, 0.0, 99, kv, sampling, -1),
        0, len(tokens), True, NOTHING, NOTHING)  # fmt: skip
    run(executable, [span])
    return shares(executable.logits(1)[0, :vocabulary], params)


def shares(logits: Floats, params: SamplingParams) -> Floats:
    """How often each token is drawn from these logits, in fp64."""
    scaled = logits.astype(np.float64) / params.temperature
    p = np.exp(scaled - scaled.max())
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    if params.top_p < 1:
        share = np.cumsum(p[order])
        p[order[np.searchsorted(share, params.top_p) + 1 :]] = 0
    return p / p.sum()


def chi_square(counts: Counter[int], p: Floats) -> None:
    """Cells with an expectation below ten are one cell; the bound is seven standard deviations."""
    total = sum(counts.values())
    seen = np.array([counts[i] for i in range(len(p))], float)
    assert seen[p == 0].sum() == 0
    large = p * total >= 10
    expected = np.append(p[large], p[~large].sum()) * total
    found = np.append(seen[large], seen[~large].sum())
    keep = expected > 0
    statistic = ((found - expected)[keep] ** 2 / expected[keep]).sum()
    freedom = keep.sum() - 1
    assert freedom > 1 and statistic < freedom + 7 * np.sqrt(2 * freedom)


TREES = 3  # of five rows with results a step


def test_tokens_drawn_along_a_tree_have_the_distribution_of_the_model(pool: Pool) -> None:
    """Two continuations of two tokens each, of which the second's blocks are a copy."""
    params = SamplingParams(temperature=1.0)
    first = distribution(pool, PROMPT, params)
    one, two = (int(t) for t in np.argsort(-first)[:2])
    seconds = {t: distribution(pool, [*PROMPT, t], params) for t in (one, two)}
    paths = [[t, int(seconds[t].argmax())] for t in (one, two)]
    executable = pool.executable(400, 2, "auto")
    spans = []
    for i in range(TREES):
        spans.append(begun(pool, params, 5 * i))
        executable.copy_block(5 * i + 1, 5 * i + 3)
    ones: Counter[int] = Counter()
    twos: dict[int, Counter[int]] = {one: Counter(), two: Counter()}
    for step in range(DRAWS // TREES + 1):
        drafted = []
        for i, span in enumerate(spans):
            state = span.sequence.sampling
            state.params = msgspec.structs.replace(params, seed=step * TREES + i)
            rows = [row for path in paths for row in state.rows_after(path)]
            own = [[5 * i + 3, 5 * i + 4]]
            tree = Draft([*paths[0], *paths[1]], rows, ["lookup"] * 2, [-1, 0, -1, 2], own)
            drafted.append(span._replace(draft=tree))
        for outcome in run(executable, drafted):
            drawn = [s.token for s in outcome.tokens]
            ones[drawn[0]] += 1
            assert (len(drawn) > 1) == (drawn[0] in (one, two))
            assert outcome.branch == (drawn[0] == two)
            if len(drawn) > 1:
                twos[drawn[0]][drawn[1]] += 1
    chi_square(ones, first)
    for token, counts in twos.items():
        chi_square(counts, seconds[token])


def begun(
    pool: Pool, params: SamplingParams, block: int, prompt: list[int] = PROMPT
) -> ScheduledSpan:
    """The last token of a prompt of which the others are computed, in blocks from `block` on."""
    tokens = list(prompt)
    kv = KVState(tokens, blocks=list(range(block, block + BLOCKS)))
    sequence = Sequence.of(
        Request(id=str(block), prompt=tokens, params=params), 0, 0.0, 99, kv,
        SamplingState(params, tokens, len(tokens), pool.lowered.program.vocabulary), -1,
    )  # fmt: skip
    count = len(tokens) - 1
    executable = pool.executable(400, 2, "auto")
    run(executable, [ScheduledSpan(sequence, 0, count, False, NOTHING, NOTHING)])
    return ScheduledSpan(sequence, count, 1, True, NOTHING, NOTHING)


@pytest.mark.parametrize(
    "options", [{"temperature": 1.0}, {"temperature": 1.3, "top_p": 0.7, "top_k": 200}], ids=str
)
def test_drawn_tokens_have_the_distribution_of_the_model(
    pool: Pool, options: dict[str, float]
) -> None:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    first = distribution(pool, PROMPT, params)
    likely = int(first.argmax())
    second = distribution(pool, [*PROMPT, likely], params)
    drafts = [[likely, int(t)] for t in np.argsort(-second)[:SPANS]]
    executable = pool.executable(400, 2, "auto")
    spans = [begun(pool, params, BLOCKS * i) for i in range(SPANS)]
    ones: Counter[int] = Counter()
    twos: Counter[int] = Counter()
    for step in range(DRAWS // SPANS):
        drafted = []
        for i, (span, draft) in enumerate(zip(spans, drafts, strict=True)):
            state = span.sequence.sampling
            state.params = msgspec.structs.replace(params, seed=step * SPANS + i)
            drafted.append(span._replace(draft=Draft(draft, state.rows_after(draft), [])))
        for outcome in run(executable, drafted):
            drawn = [s.token for s in outcome.tokens]
            ones[drawn[0]] += 1
            assert (len(drawn) > 1) == (drawn[0] == likely)
            if len(drawn) > 1:
                twos[drawn[1]] += 1
    assert ones.total() == DRAWS and twos.total() > 0
    chi_square(ones, first)
    chi_square(twos, second)


@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}], ids=str)  # fmt: skip
def test_after_real_text_tokens_have_the_distribution_of_the_model(
    smollm2: Path, options: dict[str, float]
) -> None:
    """The draft is how the text goes on. Its rows have the logits of plain steps, `==`; what a step
    draws is what the sampler draws from them, of which DRAWS are counted after three tokens."""
    params = SamplingParams(**options)  # type: ignore[arg-type]
    pool = Pool(smollm2)
    text = load_tokenizer(open_checkpoint(smollm2)).encode(real_text(400))
    prompt, draft = text[: len(PROMPT)], text[len(PROMPT) : len(PROMPT) + 7]
    executable, vocabulary = pool.executable(400, 2, "auto"), pool.lowered.program.vocabulary
    span = begun(pool, params, 0, prompt)
    state = span.sequence.sampling
    drafted = 0
    for seed in range(60):
        state.params = msgspec.structs.replace(params, seed=seed)
        rows = [state.row(), *state.rows_after(draft)]
        (outcome,) = run(executable, [span._replace(draft=Draft(draft, rows[1:], []))])
        logits = executable.logits(len(rows))[:, :vocabulary].copy()
        drawn = [_native.sample("", x, r)[0] for x, r in zip(logits, rows, strict=True)]
        same = next((i for i, t in enumerate(draft) if drawn[i] != t), len(draft))
        assert [s.token for s in outcome.tokens] == drawn[: same + 1]
        drafted += same
    assert drafted > 0
    for i, expected in enumerate(logits):
        plain = begun(pool, params, 0, prompt + draft[:i])
        run(executable, [plain])
        assert np.array_equal(executable.logits(1)[0, :vocabulary], expected)
    row, x = rows[3], logits[3]
    counts = Counter(_native.sample("", x, row._replace(seed=i))[0] for i in range(DRAWS))
    chi_square(counts, shares(x, params))
