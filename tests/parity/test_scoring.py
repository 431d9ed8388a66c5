"""Log-probabilities of prompts against transformers, and the Python API's ways of decoding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import octavo
from octavo.backends.base import ProgramOptions, StepLimits
from octavo.backends.cpu import load, lower
from octavo.checkpoint import open_checkpoint
from octavo.engine.engine import Engine
from octavo.engine.events import PromptLogprobs
from octavo.engine.request import Request, SamplingParams
from octavo.errors import RequestError
from octavo.models import build_program
from tests.small_models import Small, save_hf


@pytest.mark.parametrize("budget", [None, 7])
def test_prompts_score_as_in_transformers(tmp_path: Path, budget: int | None) -> None:
    """fp32 weights and cache; 3 texts at once, in steps of few rows of logits."""
    model = save_hf(Small(), tmp_path)
    program = build_program(open_checkpoint(tmp_path))
    options = ProgramOptions(StepLimits(64, 6, 64), 2, "f32")
    e = Engine(load(lower(program), options), 320, 300, frozenset({2}), budget)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(3, 320, n).tolist() for n in (90, 17, 1)]
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=0 if i else 3, prompt_logprobs=4, temperature=0)
        e.add(Request(id=str(i), prompt=prompt, params=params))
    scores: dict[str, list[tuple[float, list[tuple[int, float]]]]] = {"0": [], "1": [], "2": []}
    while e.has_work:
        for event in e.step():
            if isinstance(event, PromptLogprobs):
                scores[event.id] += event.logprobs
    for i, prompt in enumerate(prompts):
        with torch.no_grad():
            expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0], -1)  # type: ignore[operator]
        assert len(scores[str(i)]) == len(prompt) - 1
        for at, (logprob, top) in enumerate(scores[str(i)]):
            assert abs(logprob - expected[at, prompt[at + 1]]) < 2e-4
            best = expected[at].topk(4)
            assert [t for t, _ in top] == best.indices.tolist()
            assert max(abs(p - q) for (_, p), q in zip(top, best.values, strict=True)) < 2e-4
    assert e.stats().blocks_held == 0


def test_the_python_api_decodes_in_every_way(smollm2: Path) -> None:
    llm = octavo.LLM("smollm2", offline=True)
    beam = octavo.SamplingParams(max_tokens=8, temperature=0, beam=octavo.BeamSearch(width=4, n=3))
    found = llm.generate(["The capital of France is", "Once upon"], beam)
    assert len(found) == 6 and [c.score for c in found[:3]] == sorted(
        (c.score for c in found[:3]), reverse=True
    )  # type: ignore[type-var]
    again = llm.generate("The capital of France is", beam)
    assert [(c.tokens, c.score) for c in again] == [(c.tokens, c.score) for c in found[:3]]
    grammar = octavo.grammar.from_schema({"enum": ["Paris", "Rome"]})
    (one,) = llm.generate(
        "The capital of France is", octavo.SamplingParams(temperature=0, grammar=grammar)
    )
    assert one.text in ('"Paris"', '"Rome"') and one.finish_reason == "stop"
    with pytest.raises(RequestError, match="pattern"):
        llm.generate(
            "x", octavo.SamplingParams(grammar=octavo.grammar.from_schema({"pattern": "("}))
        )
    with pytest.raises(RequestError, match="no token"):
        both = octavo.SamplingParams(grammar=grammar, allowed_token_ids=[5])
        llm.generate("x", both)
