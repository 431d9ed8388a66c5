"""Beam search against transformers', on fp32 models; and its ways with blocks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from octavo.backends.base import ProgramOptions, StepLimits
from octavo.backends.cpu import load, lower
from octavo.checkpoint import open_checkpoint
from octavo.engine.constraint import Constraint
from octavo.engine.engine import Engine
from octavo.engine.events import BeamText, Ended, TokenEvent
from octavo.engine.request import BeamSearch, Request, SamplingParams
from octavo.errors import RequestError
from octavo.models import build_program
from tests.small_models import Small, save_hf

EOS = 2
SMALL = Small(heads=4, kv_heads=2, head_dim=16, vocabulary=320, tied=False)
PROMPTS = [[5, 9, 200, 31], list(range(40, 77))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("beam")


@pytest.fixture(scope="module")
def model(folder: Path) -> torch.nn.Module:
    model = save_hf(SMALL, folder)
    with torch.no_grad():  # an end of sequence that is likely enough to be met
        model.lm_head.weight[EOS] *= 2.5
        model.lm_head.weight.mul_(2.0)
    model.save_pretrained(folder)
    return model


def engine(folder: Path, blocks: int = 256, selected: int = 32, **options: Any) -> Engine:
    program = build_program(open_checkpoint(folder))
    executable = load(lower(program), ProgramOptions(StepLimits(64, selected, blocks), 2, "f32"))
    return Engine(executable, program.vocabulary, 512, frozenset({EOS}), **options)


def run(e: Engine, *requests: Request) -> dict[str, list[TokenEvent]]:
    out: dict[str, list[TokenEvent]] = {r.id: [] for r in requests}
    for r in requests:
        e.add(r)
    for _ in range(10_000):
        if not e.has_work:
            break
        for event in e.step():
            out[event.id].append(event)
    assert not e.has_work
    return out


def texts(events: list[TokenEvent]) -> list[tuple[list[int], float]]:
    """(tokens, score) of every beam, best first."""
    found = [event for event in events if isinstance(event, BeamText)]
    assert len(found) == len(events)
    assert [(t.index, t.last) for t in found] == [
        (i, i + 1 == len(found)) for i in range(len(found))
    ]
    assert all(len(t.tokens) == len(t.logprobs) == len(t.tops) for t in found)
    assert all(0 < t.times.queued <= t.times.admitted < t.times.first_token for t in found)
    assert all(t.times.first_token <= t.times.last_token for t in found)
    return [(t.tokens, t.score) for t in found]


def request(
    prompt: list[int], width: int, tokens: int = 24, name: str = "a", **beam: Any
) -> Request:
    search = BeamSearch(width=width, **({"n": width} | beam))
    params = SamplingParams(max_tokens=tokens, temperature=0, beam=search)
    return Request(id=name, prompt=prompt, params=params)


@pytest.mark.parametrize("early", [False, True, "never"])
@pytest.mark.parametrize("penalty", [0.6, 1.0, 1.4])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_equals_transformers(
    folder: Path, model: Any, width: int, penalty: float, early: Any
) -> None:
    e = engine(folder)
    for prompt in PROMPTS:
        expected = model.generate(
            torch.tensor([prompt]), num_beams=width, num_return_sequences=width, do_sample=False,
            length_penalty=penalty, early_stopping=early, max_new_tokens=24, eos_token_id=EOS,
            pad_token_id=0, output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        got = texts(
            run(e, request(prompt, width, length_penalty=penalty, early_stopping=early))["a"]
        )
        assert len(got) == width
        for (tokens, score), row, reference in zip(
            got, expected.sequences, expected.sequences_scores, strict=True
        ):
            rest = row[len(prompt) :].tolist()
            assert tokens == rest[: len(tokens)] and set(rest[len(tokens) :]) <= {0, EOS}
            assert abs(score - float(reference)) < 1e-4
    assert any(len(t) < 24 for t, _ in got)  # some met the end of sequence


def test_neighbours_chunks_and_preemption_change_nothing(folder: Path, model: Any) -> None:
    alone = texts(run(engine(folder), request(PROMPTS[1], 6))["a"])
    crowd = [request(PROMPTS[i % 2], 2 + i, name=f"n{i}") for i in range(3)]
    plain = Request(
        id="p", prompt=PROMPTS[0], params=SamplingParams(max_tokens=60, temperature=1, seed=3)
    )
    for options in ({}, {"budget": 7}, {"prefix_caching": False}):
        e = engine(folder, **options)
        assert texts(run(e, request(PROMPTS[1], 6), *crowd, plain)["a"]) == alone
        steps = e.stats().steps
    # Room for one search, not for two: beams wait for others of theirs, or lose their blocks.
    preemptions = 0
    for blocks, selected in ((16, 9), (14, 6)):
        tight = engine(folder, blocks=blocks, selected=selected)
        both = run(tight, request(PROMPTS[1], 6), request(PROMPTS[1], 6, name="b"), plain)
        assert texts(both["a"]) == alone == texts(both["b"])
        assert tight.stats().steps > steps and tight.stats().blocks_held == 0
        preemptions += tight.scheduler.preemptions
    assert preemptions


def test_width_is_what_the_blocks_allow(folder: Path, model: Any) -> None:
    narrow = engine(folder, blocks=12)
    events = run(narrow, request(PROMPTS[1], 8, n=2))["a"]
    assert isinstance(events[0], BeamText)
    width = events[0].width
    assert 2 <= width < 8
    assert texts(events) == texts(run(engine(folder), request(PROMPTS[1], width, n=2))["a"])
    assert narrow.stats().blocks_held == 0


def test_cancelling_frees_every_beam(folder: Path, model: Any) -> None:
    e = engine(folder)
    e.add(request(PROMPTS[0], 8, tokens=100))
    for _ in range(10):
        e.step()
    assert e.stats().running > 1
    e.abort("a")
    assert e.stats().running == e.stats().blocks_held == 0 and not e.has_work
    gc.collect()


def test_a_failing_step_ends_the_search_once(
    folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = engine(folder)
    e.add(request(PROMPTS[0], 4, tokens=100))
    for _ in range(6):
        e.step()

    def broken(step: object) -> None:
        raise ValueError("broken")

    with monkeypatch.context() as m:
        m.setattr(e._executable, "step", broken)
        events = e.step()
    assert [(v.id, v.finish) for v in events if isinstance(v, Ended)] == [("a", "error")]
    assert len(events) == 1
    assert e.stats().running == e.stats().blocks_held == 0 and not e.has_work
    assert texts(run(e, request(PROMPTS[0], 4))["a"])


class Brittle:
    """A grammar that allows everything, until a copy of it is made for the `left`th time."""

    finished = complete = False

    def __init__(self, left: Iterator[int]) -> None:
        self._left = left

    def push(self, token: int) -> None:
        pass

    def fork(self) -> Brittle:
        if not next(self._left):
            raise ValueError("grammar: too costly")
        return Brittle(self._left)


def test_a_fork_that_fails_leaves_no_blocks(folder: Path, model: Any) -> None:
    """Whichever it is: the first 8 of a step try candidates, those after them become beams."""
    e = engine(folder)
    for forks in range(30):
        e.add(request(PROMPTS[1], 4))
        e._requests["a"].sampling.constraint = cast(Constraint, Brittle(iter(range(forks, -1, -1))))
        events = [event for _ in range(10) if e.has_work for event in e.step()]
        assert [(v.id, v.finish) for v in events if isinstance(v, Ended)] == [("a", "refused")]
        assert e.stats().running == e.stats().waiting == e.stats().blocks_held == 0


def test_a_beam_without_legal_tokens_is_given_up(folder: Path, model: Any) -> None:
    """Of two tokens one must not follow the other, so half of all beams end there."""
    e = engine(folder)
    params = SamplingParams(
        max_tokens=6, temperature=0, beam=BeamSearch(width=4, n=4), allowed_token_ids=[7, 9],
        bad_words=[[7, 7], [7, 9]],
    )  # fmt: skip
    e.add(Request(id="a", prompt=PROMPTS[0], params=params))
    events: list[TokenEvent] = []
    while e.has_work:
        events += e.step()
    found = [tokens for tokens, _ in texts(events)]
    assert all(set(t[:-1]) <= {9} for t in found) and [9] * 6 in found
    assert e.stats().blocks_held == 0


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"temperature": 1.0}, "temperature"), ({"top_k": 5}, "top_k"), ({"stop": ["x"]}, "stop"),
        ({"presence_penalty": 1.0}, "presence_penalty"), ({"beam": BeamSearch(width=0)}, "beam_width"),
        ({"beam": BeamSearch(width=33)}, "beam_width"), ({"beam": BeamSearch(width=2, n=3)}, "n"),
        ({"beam": BeamSearch(width=2, length_penalty=99)}, "length_penalty"),
    ],
)  # fmt: skip
def test_refused_by_name(changes: dict[str, Any], name: str) -> None:
    fields = {"temperature": 0.0, "beam": BeamSearch(width=2)} | changes
    with pytest.raises(RequestError) as e:
        SamplingParams(**fields).check(100)
    assert e.value.param == name
