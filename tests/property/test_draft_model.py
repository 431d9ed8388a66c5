"""A draft model, or the target without some of its layers, changes no token and no log-probability."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from octavo.backends.base import ProgramOptions, SamplingRow, StepInput, StepLimits
from octavo.backends.cpu import CpuExecutable, load, lower
from octavo.checkpoint import open_checkpoint
from octavo.engine.constraint import GrammarCompiler, TokenTable
from octavo.engine.draft_model import DraftModel, Languages
from octavo.engine.drafts import FREE
from octavo.engine.engine import Engine
from octavo.engine.kv import KVState
from octavo.engine.lookahead import DraftWriter
from octavo.engine.request import Request, SamplingParams
from octavo.engine.runner import DraftSpan, draft_input
from octavo.engine.sampling_state import SamplingState
from octavo.engine.self_draft import SelfDraft
from octavo.engine.sequence import Sequence
from octavo.engine.translation import Translation
from octavo.generate.served import token_table
from octavo.models import build_program
from octavo.text import load_tokenizer
from octavo.text.grammar import HEADER
from tests.property.test_exact import Pool, alone, drive
from tests.property.test_speculation import VOCABULARY, AnyDepths, requests
from tests.small_models import Small, save_gguf

SHAPE = Small(heads=6, kv_heads=2, head_dim=16)
# The target's weights in another format; others, of another shape; another vocabulary.
DRAFTS = {"alike": (SHAPE, Q.Q8_0), "other": (Small(layers=1, heads=2, kv_heads=1), Q.F32), "words": (Small(vocabulary=300), Q.F32)}  # fmt: skip


def table(path: Path) -> TokenTable:
    return token_table(load_tokenizer(open_checkpoint(path)))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long something took decides nothing."""
    monkeypatch.setattr("octavo.engine.speculation.LEEWAY", 1e9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    save_gguf(SHAPE, path / "target.gguf", Q.Q4_1)
    for name, (shape, quant) in DRAFTS.items():
        save_gguf(shape, path / f"{name}.gguf", quant)
    return path


@pytest.fixture(scope="module")
def pool(folder: Path) -> Pool:
    return Pool(folder / "target.gguf")


def draft_model(folder: Path, name: str, blocks: int = 400, beside: Any = None) -> DraftModel:
    checkpoint = open_checkpoint(folder / f"{name}.gguf")
    program = build_program(checkpoint)
    threads = beside.threads if beside else 1
    options = ProgramOptions(StepLimits(64, 16, blocks), threads, "bf16", activations="auto")
    languages = None
    if program.vocabulary != VOCABULARY:
        own, target = table(folder / f"{name}.gguf"), table(folder / "target.gguf")
        languages = Languages(Translation(target, own), Translation(own, target), [256])
    executable = load(lower(program), options, beside=beside)
    return DraftModel(executable, VOCABULARY, program.context, languages)


def writer(folder: Path, name: str, executable: CpuExecutable, rng: random.Random) -> DraftWriter:
    if name == "self":
        return SelfDraft(executable, rng.sample(range(executable.parts), 2))
    return draft_model(folder, name, rng.choice([9, 400]), executable)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [*DRAFTS, "self"])
def test_texts_and_log_probabilities_are_the_same(
    pool: Pool, folder: Path, name: str, seed: int
) -> None:
    asked, rng = requests(seed, 8), random.Random(seed)
    expected = alone(pool, asked)
    blocks, threads = rng.choice([45, 400]), rng.choice([1, 2])
    made = writer(folder, name, pool.executable(blocks, threads, "auto"), rng)
    sources: dict[str, Any] = {} if seed else {"sources": []}
    engine = pool.engine(
        blocks, threads, budget=rng.choice([19, 256]), prefix_caching=rng.random() < 0.5,
        multi_step=rng.choice([0.0, 10.0]), depths=AnyDepths(seed), writer=made, **sources,
    )  # fmt: skip
    assert drive(engine, rng.sample(asked, len(asked)), rng) == expected
    assert drive(engine, asked, rng) == expected
    stats = engine.stats()
    drafted, accepted = (
        (stats.drafted_self, stats.accepted_self) if name == "self" else (stats.drafted_draft, stats.accepted_draft)
    )  # fmt: skip
    # Where texts have drafts as well, those may be better each time.
    verified = drafted + stats.drafted_lookup + stats.drafted_recent
    assert 0 <= accepted <= drafted <= verified and verified > 0
    if isinstance(made, DraftModel):
        assert made.blocks_held == 0 and len(made._held) == 0


class Deep(AnyDepths):
    """Has so many tokens written, and verifies all of them."""

    def __init__(self, depth: int) -> None:
        super().__init__(0)
        self.depth = depth
        self.times.record(1, 1.0, 0.0)

    def depths(self, chances: list[list[float]], *more: Any) -> list[int]:
        return [len(c) if i < more[-1] else 0 for i, c in enumerate(chances)]

    def ahead(self, likely: list[float], chances: list[list[float]], *_: Any) -> int:
        return self.depth


def request(id: str = "a", **fields: Any) -> Request:
    params: dict[str, Any] = {"max_tokens": 33, "temperature": 0, "ignore_eos": True} | fields
    return Request(id=id, prompt=[5, 6, 7, 90, 91], params=SamplingParams(**params))


def same(folder: Path, pool: Pool, depth: int = 7) -> tuple[Engine, DraftModel]:
    """An engine whose draft model is the target itself."""
    made = draft_model(folder, "target")
    return trusting(pool.engine(depths=Deep(depth), sources=[], writer=made)), made


def trusting(engine: Engine) -> Engine:
    """An engine that has seen drafts be right a million times, however unsure a model was."""
    for source in ("draft", "self"):
        engine._speculation._known._seen.update(
            {(source, c, FREE): (1e6, 1e6) for c in range(-10, 1)}
        )
    return engine


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 7}, {"temperature": 1.2, "top_p": 0.8, "seed": 8}], ids=str)  # fmt: skip
def test_a_draft_model_that_is_right_saves_steps(
    pool: Pool, folder: Path, fields: dict[str, Any]
) -> None:
    """Sampled texts too: the draft model draws with the random number of the same position."""
    asked = request(**fields)
    expected = alone(pool, [asked])
    engine, _ = same(folder, pool)
    assert drive(engine, [asked]) == expected
    stats = engine.stats()
    assert stats.drafted_draft == stats.accepted_draft == 28
    assert stats.steps == 5  # the prompt and its token; four times eight tokens


def test_what_skips_nothing_is_right(pool: Pool) -> None:
    asked = request()
    expected = alone(pool, [asked])
    made = SelfDraft(pool.executable(400, 2, "auto"), [])
    engine = trusting(pool.engine(depths=Deep(7), sources=[], writer=made))
    assert drive(engine, [asked]) == expected
    assert engine.stats().drafted_self == engine.stats().accepted_self == 28


def test_a_batch_is_written_together(pool: Pool, folder: Path) -> None:
    asked = [request(str(i), temperature=1.0, seed=i) for i in range(3)]
    expected = alone(pool, asked)
    engine, made = same(folder, pool, 4)
    assert drive(engine, asked) == expected
    # Catching up with three prompts, then a call for every five tokens of all three.
    assert made._executable.counters.steps == 1 + 3 + 6 * 4
    assert made.blocks_held == 0


def test_prompts_that_begin_alike_are_computed_once(pool: Pool, folder: Path) -> None:
    prompt = [random.Random(1).randrange(3, 250) for _ in range(80)]
    engine, made = same(folder, pool)
    computed = []
    for i in range(2):
        asked = Request(id=str(i), prompt=[*prompt, 7 + i], params=request(max_tokens=9).params)
        engine.add(asked)
        while engine.has_work:
            engine.step()
        computed.append(made._kv.index.available)
    held = made._kv.index.match(prompt, "")
    assert held.tokens == 80
    made._kv.index.free(
        held.blocks + ([held.partial_block] if held.partial_block is not None else [])
    )
    assert len(made._kv.index) <= 80 // 16 + 2


def test_an_aborted_and_a_preempted_sequence_hold_nothing(pool: Pool, folder: Path) -> None:
    engine, made = same(folder, pool)
    engine.add(request("a"))
    engine.add(request("b"))
    for _ in range(3):
        engine.step()
    both = made.blocks_held
    engine.abort("a")
    assert 0 < made.blocks_held < both
    engine.scheduler.preempt(engine.scheduler.running[0])
    assert made.blocks_held == 0


def test_a_draft_model_that_fails_costs_no_request(
    pool: Pool, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = [request("a"), request("b", temperature=1.0, seed=3)]
    expected = alone(pool, asked)
    engine, made = same(folder, pool)
    calls: Iterator[int] = iter(range(1000))
    decode = made._executable.decode

    def failing(*args: Any, **more: Any) -> Any:
        if next(calls) % 4 == 1:
            raise RuntimeError("no")
        return decode(*args, **more)

    monkeypatch.setattr(made._executable, "decode", failing)
    assert drive(engine, asked) == expected
    assert "no drafts could be written" in caplog.text
    assert made.blocks_held == 0 and engine.stats().accepted_draft > 0


def test_grammars(pool: Pool, folder: Path) -> None:
    grammar = HEADER + 'start: ("the cat " | "the cow ") /[a-f ]{0,40}/ "."'
    asked = [
        request("a", grammar=grammar, ignore_eos=False, logprobs=1),
        request("b", bad_words=[[9]]),
    ]

    def run(**options: Any) -> dict[str, Any]:
        engine = pool.engine(
            grammars=GrammarCompiler(table(folder / "target.gguf"), VOCABULARY), **options
        )
        return drive(engine, asked[:1]) | drive(engine, asked[1:])

    expected = run()
    assert run(depths=Deep(5), writer=draft_model(folder, "target")) == expected


def test_text_passes_between_vocabularies(folder: Path) -> None:
    one, other = table(folder / "target.gguf"), table(folder / "words.gguf")
    there, back = Translation(one, other), Translation(other, one)
    tokens = [*(one.tokens.index(c.encode()) for c in "a cat"), 257, one.tokens.index(b"th"), *(one.tokens.index(b) for b in (b"\xc3", b"\xa4", b"\xc3"))]  # fmt: skip
    written, rest = there.write(there.pieces(tokens), b"")
    assert rest == b"\xc3"
    assert b"".join(other.tokens[t] for t in written) == "a cat<|extra_1|>thä".encode()
    assert written[5] == 257 and other.tokens[written[6]] == b"th"
    again, rest = back.write(back.pieces(written), b"")
    assert again == tokens[:-1] and rest == b""


def test_its_text_stays_in_its_context(pool: Pool, folder: Path) -> None:
    """Which a text may leave that is within it in the target's tokens."""
    engine, made = pool.engine(), draft_model(folder, "words")
    tokens = table(folder / "target.gguf").tokens
    prompt = [tokens.index(c.encode()) for c in "a cat"]
    engine.add(Request(id="", prompt=prompt, params=SamplingParams()))
    sequence = engine.scheduler.waiting[0]
    assert made._languages is not None
    made._languages = made._languages._replace(first=[256] * 20)
    held = made._follow(sequence, 0)
    assert held is not None
    made._context = len(held.kv.tokens) + 5
    assert made._follow(sequence, 5) is held and made._follow(sequence, 6) is None


def test_a_brief_step_computes_the_program_without_its_parts(pool: Pool, folder: Path) -> None:
    """Without the last layer, the model is the one that was made with a layer less."""
    save_gguf(replace(SHAPE, layers=2), folder / "less.gguf", Q.Q4_1)
    whole, less = pool.executable(45, 1, "auto"), Pool(folder / "less.gguf").executable(45, 1, "auto")  # fmt: skip
    assert (whole.parts, less.parts) == (6, 4)
    whole.skip([4, 5])
    for executable, brief in ((whole, True), (less, False)):
        (samples,) = executable.decode(prompt_step(), 1, [], brief=brief)
        assert samples[0].token >= 0
    assert np.array_equal(whole.logits(1), less.logits(1))
    whole.decode(prompt_step(), 1, [])
    assert not np.array_equal(whole.logits(1), less.logits(1))


def prompt_step() -> StepInput:
    return draft_input([DraftSpan([0, 1], 0, list(range(40, 60)), SamplingRow())])


def test_a_brief_step_needs_to_know_what_to_skip(folder: Path) -> None:
    executable = Pool(folder / "other.gguf").executable(45, 1, "auto")
    with pytest.raises(ValueError, match="brief"):
        executable.decode(prompt_step(), 1, [], brief=True)
    with pytest.raises(IndexError):
        executable.skip([99])


def test_it_goes_on_as_if_it_had_written_nothing(folder: Path) -> None:
    """After drafts of which some tokens were drawn, and after many that it did not see."""
    rng = random.Random(3)
    prompt = [rng.randrange(3, 250) for _ in range(40)]
    made = draft_model(folder, "target")

    def sequence(tokens: list[int]) -> Sequence:
        asked = Request(id="a", prompt=prompt, params=request().params)
        kv = KVState([*prompt, *tokens])
        state = SamplingState(asked.params, kv.tokens, len(prompt), VOCABULARY)
        return Sequence.of(asked, 0, 0.0, 400, kv, state, -1)

    one = sequence([])
    right = 0
    for drawn in [0, 1, 3, 5, 2, 0, 5, 4, 1, 0, 3, 5, 0, 2, 4]:
        (proposal,) = made.propose([one], 5)
        other, same = draft_model(folder, "target"), sequence(one.kv.tokens[len(prompt) :])
        other.propose([same], 5)  # it takes 64 tokens at a time
        (fresh,) = other.propose([same], 5)
        assert proposal == fresh and proposal is not None
        kept = proposal.tokens[:drawn]
        right += len(kept)
        for token in [*kept, rng.randrange(3, 250), *[rng.randrange(3, 250)] * (drawn == 4)]:
            one.append(token)
    assert right > 30
    made.free(one)
    assert made.blocks_held == 0
