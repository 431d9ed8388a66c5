"""Drafts change no token and no log-probability, whatever they propose and however deep."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict

from octavo.backends.cpu import CpuExecutable
from octavo.checkpoint import open_checkpoint
from octavo.engine.constraint import GrammarCompiler
from octavo.engine.cost import StepTimes
from octavo.engine.draft_model import DraftModel
from octavo.engine.drafts import LONGEST_MATCH, MAX_DRAFT, DraftSource, Proposal, all_sources
from octavo.engine.request import Request, SamplingParams
from octavo.engine.self_draft import SelfDraft
from octavo.engine.sequence import Sequence
from octavo.generate.load import ACTIVATIONS
from octavo.generate.served import token_table
from octavo.text import load_tokenizer
from octavo.text.grammar import HEADER
from tests.conftest import real_text
from tests.parity.test_lora import SMALL, engine, make_adapter
from tests.property.test_exact import MATRIX, Output, Pool, alone, drive, made
from tests.small_models import save_hf

VOCABULARY = 320


class AnyDepths:
    """Verifies any number of tokens."""

    def __init__(self, seed: int, most: int = MAX_DRAFT) -> None:
        self.times = StepTimes()
        self._rng = random.Random(seed)
        self._most = most

    def depths(self, chances: list[list[float]], rows: int, room: int, now: float) -> list[int]:
        out = []
        for each in chances:
            out.append(self._rng.randint(0, min(len(each), room, self._most)))
            room -= out[-1]
        return out

    def affordable(self, rows: int, now: float, allowance: float, most: int) -> int:
        return most

    def ahead(
        self, likely: list[float], chances: list[list[float]], rows: int, room: int, now: float,
        cost: Callable[[int], float], most: int,
    ) -> int:  # fmt: skip
        return self._rng.choice([0, 1, 2, 5, self._most])


class Knowing:
    """Proposes what is known to follow, with mistakes."""

    def __init__(
        self, known: dict[str, Output], seed: int, mistakes: float, name: str = "lookup"
    ) -> None:
        self.name = name
        self._known = known
        self._rng = random.Random(seed)
        self._mistakes = mistakes

    def propose(self, sequence: Sequence) -> Proposal | None:
        done = sequence.sampling.generated
        tokens = [t for t, *_ in self._known[sequence.id][done : done + MAX_DRAFT]]
        return (
            Proposal(self.name, [self._maybe(t or 0) for t in tokens], LONGEST_MATCH)
            if tokens
            else None
        )

    def _maybe(self, token: int) -> int:
        return self._rng.randrange(VOCABULARY) if self._rng.random() < self._mistakes else token

    def finish(self, sequence: Sequence) -> None: ...


@pytest.fixture(scope="module", params=MATRIX)
def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pool:
    return made(request.param, tmp_path_factory.mktemp("model"))


def requests(seed: int, count: int) -> list[Request]:
    """Of all kinds: greedy and sampled; what follows depends on what was drawn, or does not."""
    rng = random.Random(seed)
    out = []
    for i in range(count):
        few = rng.sample(range(3, 256), 6)
        prompt = [rng.choice(few) for _ in range(rng.randrange(2, 90))]
        common: dict[str, Any] = {
            "max_tokens": rng.randrange(1, 40), "temperature": rng.choice([0.0, 0.0, 0.8]),
            "top_p": rng.choice([1.0, 0.9]), "seed": rng.randrange(1 << 60), "ignore_eos": True,
            "logprobs": rng.choice([None, 2]),
        }  # fmt: skip
        more: dict[str, Any] = rng.choice(
            [
                {}, {}, {"repetition_penalty": 1.2}, {"frequency_penalty": 0.7}, {"min_tokens": 1},
                {"presence_penalty": 0.5}, {"stop_token_ids": rng.sample(range(3, 256), 30)},
                {"allowed_token_ids": few}, {"bad_words": [[t] for t in few[:2]]}, {"logit_bias": {few[0]: 4.0}},
            ]
        )  # fmt: skip
        out.append(
            Request(
                id=str(i),
                prompt=prompt,
                params=SamplingParams(**(common | more)),
                prediction=rng.choice([[], few * 3]),
                salt=rng.choice(["", "a"]),
            )  # fmt: skip
        )
    return out


def sources_of(
    name: str, pool: Pool, executable: CpuExecutable, expected: dict[str, Output], rng: random.Random
) -> dict[str, Any]:  # fmt: skip
    """What an engine is given: sources that find drafts, and what writes some."""
    if name == "found":
        return {"sources": all_sources()}
    if name == "known":
        return {"sources": [Knowing(expected, rng.randrange(99), 0.1), *all_sources()]}
    if name == "self":
        skip = rng.sample(range(executable.parts), 1)
        return {"sources": [], "writer": SelfDraft(executable, skip)}
    own = pool.executable(rng.choice([9, 401]), executable.threads, "auto")
    return {"writer": DraftModel(own, VOCABULARY, pool.lowered.program.context)}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sources", ["found", "known", "draft", "self"])
def test_texts_and_log_probabilities_are_the_same(
    pool: Pool, sources: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains and trees, where a source proposes two ways or a model has written a second best."""
    monkeypatch.setattr("octavo.engine.speculation.LEEWAY", 1e9)  # no matter how long steps take
    monkeypatch.setattr("octavo.engine.cost.LEAST_CHANCE", 0.0)  # nor how often drafts are wrong
    asked, rng, look = requests(seed, 8), random.Random(seed), random.Random(seed)
    share = (1.0, 0.9, 0.7)[seed]  # of sequences that a call looks at
    monkeypatch.setattr("octavo.engine.pause.Pause.over", lambda *_: look.random() < share)
    blocks, threads, activations = rng.choice([45, 400]), rng.choice([1, 2]), ACTIVATIONS[seed]
    expected = alone(pool, asked, activations)
    given = sources_of(sources, pool, pool.executable(blocks, threads, activations), expected, rng)
    engine = pool.engine(
        blocks, threads, activations, budget=rng.choice([19, 256]),
        prefix_caching=rng.random() < 0.5, multi_step=rng.choice([0.0, 10.0]),
        depths=AnyDepths(seed), **given,
    )  # fmt: skip
    assert drive(engine, rng.sample(asked, len(asked)), rng) == expected
    assert drive(engine, asked, rng) == expected  # and again, with what the cache and `recent` hold
    stats = asdict(engine.stats())
    names = [sources] if "writer" in given else ["lookup", "prediction", "recent"]
    accepted, drafted = (sum(stats[f"{k}_{n}"] for n in names) for k in ("accepted", "drafted"))
    # Without a part, a random model may be wrong each time.
    assert (0 if sources == "self" else 1) <= accepted < drafted


@pytest.mark.parametrize("sources", ["found", "self"])
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_real_models(
    name: str, sources: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.engine.speculation.LEEWAY", 1e9)
    path: Path = request.getfixturevalue(name)
    pool = Pool(path)
    text = load_tokenizer(open_checkpoint(path)).encode(real_text(2000))
    asked = [
        Request(
            id=f"{i}{temperature}", prompt=2 * text[50 * i : 50 * (i + 1)],
            params=SamplingParams(
                max_tokens=48, temperature=temperature, seed=i, logprobs=2, ignore_eos=True
            ),
        )
        for i in range(3)
        for temperature in (0.0, 0.7)
    ]  # fmt: skip
    expected, rng = alone(pool, asked), random.Random(1)
    given = sources_of(sources, pool, pool.executable(400, 2, "auto"), expected, rng)
    engine = pool.engine(depths=AnyDepths(1), **given)
    assert drive(engine, asked, rng) == expected
    stats = asdict(engine.stats())
    kind = {"found": "lookup"}.get(sources, sources)
    assert 0 < stats[f"accepted_{kind}"] < stats[f"drafted_{kind}"]


def test_a_draft_that_is_right_takes_one_step(pool: Pool) -> None:
    request = Request(
        id="a",
        prompt=[5, 6, 7],
        params=SamplingParams(max_tokens=33, temperature=0, ignore_eos=True),
    )
    expected = alone(pool, [request])
    policy = AnyDepths(0)
    policy.depths = lambda chances, *_: [len(c) for c in chances]  # type: ignore[method-assign]
    engine = pool.engine(depths=policy, sources=[Knowing(expected, 0, 0.0)])
    assert drive(engine, [request]) == expected
    stats = engine.stats()
    assert stats.drafted_lookup == stats.accepted_lookup == 30
    assert stats.steps == 3  # the prompt and its token; sixteen tokens; as many


class Everything(AnyDepths):
    """Verifies all tokens of all proposals, and counts the forks."""

    def __init__(self) -> None:
        super().__init__(0)
        self.forks = 0

    def depths(self, chances: list[list[float]], rows: int, room: int, now: float) -> list[int]:
        self.forks += len(chances) - rows
        out = []
        for each in chances:
            out.append(min(len(each), room, 3))
            room -= out[-1]
        return out


def test_of_a_tree_the_branch_that_is_drawn_is_kept(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the first source is wrong, the second is right, and the other way round."""
    monkeypatch.setattr("octavo.engine.speculation.LEEWAY", 1e9)  # no matter how long steps take
    asked = [
        Request(
            id=str(i), prompt=list(range(5 + i, 20 + 3 * i)),
            params=SamplingParams(max_tokens=40, temperature=i % 2, seed=i, ignore_eos=True, logprobs=2),
        )
        for i in range(4)
    ]  # fmt: skip
    expected = alone(pool, asked)
    policy = Everything()
    sources: list[DraftSource] = [
        Knowing(expected, 1, 0.4), Knowing(expected, 2, 0.4, "recent"), Knowing(expected, 3, 0.4, "prediction"),
    ]  # fmt: skip
    engine = pool.engine(depths=policy, sources=sources)
    for request in asked:
        assert drive(engine, [request]) == {request.id: expected[request.id]}
    assert drive(engine, asked, random.Random(1)) == expected
    stats = engine.stats()
    assert policy.forks > 50
    assert min(stats.accepted_lookup, stats.accepted_recent, stats.accepted_prediction) > 10
    assert stats.steps < stats.generated_tokens / 2


def test_a_tree_that_fails_frees_its_blocks(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.engine.speculation.LEEWAY", 1e9)
    asked = Request(id="a", prompt=list(range(5, 25)), params=SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))  # fmt: skip
    expected = alone(pool, [asked])
    sources: list[DraftSource] = [Knowing(expected, i, 0.5, n) for i, n in enumerate(("lookup", "recent"))]  # fmt: skip
    engine = pool.engine(depths=Everything(), sources=sources)
    step, trees = engine._executable.step, []

    def failing(given: Any) -> Any:
        if given.kv_writes is not None:
            trees.append(given)
            raise RuntimeError("no")
        return step(given)

    monkeypatch.setattr(engine._executable, "step", failing)
    assert drive(engine, [asked]) == expected
    assert len(trees) > 3


GRAMMARS = [
    'start: "{" /[a-z]{1,8}/ ":" /[0-9]{1,6}/ "}"',
    'start: ("abcdefgh" /[xy]/)+',
    'start: ("the cat " | "the cow ") /[a-f ]{0,40}/ "."',
]


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("exits", [False, True])
def test_grammars(
    exits: bool, logprobs: int | None, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pool = made("llama", tmp_path)
    table = token_table(load_tokenizer(open_checkpoint(tmp_path / "m.gguf")))
    asked = [
        Request(
            id=f"{i}{temperature}", prompt=[70 + i, 71, 72, 70 + i, 71],
            params=SamplingParams(
                max_tokens=40, temperature=temperature, seed=i, grammar=HEADER + grammar, logprobs=logprobs,
                grammar_exit=exits, ignore_eos=False,
            ),
        )
        for i, grammar in enumerate(GRAMMARS)
        for temperature in (0.0, 1.0)
    ]  # fmt: skip

    def run(**options: Any) -> tuple[dict[str, Output], Any]:
        engine = pool.engine(grammars=GrammarCompiler(table, VOCABULARY), **options)
        out: dict[str, Output] = {}
        for r in asked:
            out |= drive(engine, [r])
        return out, engine.stats()

    expected, _ = run()
    for seed, sources in ((1, []), (2, [Knowing(expected, 3, 0.2)])):
        found, stats = run(depths=AnyDepths(seed), sources=[*all_sources(), *sources])
        assert found == expected
        if logprobs is not None:
            assert stats.accepted_forced > 0 and stats.drafted_forced >= stats.accepted_forced


def test_adapters(tmp_path: Path) -> None:
    """Rows of a draft are computed with the adapter of their sequence."""
    save_hf(SMALL, tmp_path / "model")
    e = engine(tmp_path / "model")
    assert e.adapters is not None
    for i in range(2):
        e.adapters.load(f"a{i}", make_adapter(tmp_path / f"a{i}", i))

    def asked(speculation: str, salt: str) -> list[Request]:
        params = SamplingParams(
            max_tokens=40, temperature=0, logprobs=2, ignore_eos=True, speculation=speculation
        )
        names = ["a0", "a1", ""]
        return [
            Request(id=str(i), prompt=[5, 6, 7, 5, 6], params=params, adapter=name, salt=salt)
            for i, name in enumerate(names)
        ]

    expected = drive(e, asked("off", "a"))
    assert len({tuple(t for t, *_ in out) for out in expected.values()}) == 3
    assert e.stats().drafted_lookup == 0
    e._speculation._policy = AnyDepths(1)
    e._speculation._sources.append(Knowing(expected, 2, 0.1))
    assert drive(e, asked("auto", "b")) == expected
    assert e.stats().accepted_lookup > 0
