"""Layers see what the model computes, of the text that was given."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.backends.torch.reference import Reference
from octavo.backends.torch.spans import Spans
from octavo.checkpoint import open_checkpoint
from octavo.compress import calibrated, scaled, written
from octavo.compress.beside import beside
from octavo.compress.calibration import Calibration
from octavo.compress.data import split, token_blocks
from octavo.compress.folder_view import as_folder
from octavo.compress.groups import blocks, whole
from octavo.compress.quantize import job_of
from octavo.compress.recipe_file import find_recipe
from octavo.errors import UsageError
from octavo.models import build_program
from octavo.program import Experts, Linear, Program
from octavo.text.tokenizer import load_tokenizer
from tests.calibration.small import contents, quantized
from tests.families import FAMILIES, save_family


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3", "olmoe", "gpt2"])
@pytest.mark.parametrize("memory", [1 << 30, 0])
def test_spans(family: str, memory: int, tmp_path: Path) -> None:
    """Cut anywhere, in memory or in a file: the inputs of every layer are the reference's."""
    save_family(FAMILIES[family], tmp_path / "model")
    program = build_program(open_checkpoint(tmp_path / "model"))
    tokens = np.random.default_rng(0).integers(5, program.vocabulary, (3, 17), dtype=np.int32)
    spans = Spans(program, tokens, tmp_path, memory=memory)
    at, seen = 0, 0
    for i, op in enumerate(program.ops):
        if not isinstance(op, Linear | Experts) or op.out.selected:
            continue
        spans.run(at, i)
        at = i
        if seen % 5 == 0:
            until = Reference(replace(program, ops=program.ops[:i], output=op.x))
            for ids, x in zip(tokens.tolist(), spans.inputs(op.x), strict=True):
                assert (until.logits(ids).numpy() == x).all()
        seen += 1
    assert seen > 4
    spans.close()


def test_expert_inputs(tmp_path: Path) -> None:
    """Each expert sees the tokens that are routed to it, and its second matrix what the first gave."""
    save_family(FAMILIES["mixtral"], tmp_path / "model")
    program = build_program(open_checkpoint(tmp_path / "model"))
    tokens = np.random.default_rng(0).integers(5, program.vocabulary, (2, 40), dtype=np.int32)
    i, op = next((i, op) for i, op in enumerate(program.ops) if isinstance(op, Experts))
    spans = Spans(program, tokens, tmp_path)
    spans.run(0, i)
    reference, counted = Reference(program), 0
    out = [torch.zeros(40, op.out.width) for _ in tokens]
    xs, routes = list(spans.inputs(op.x)), list(spans.inputs(op.routes))
    for e in range(len(op.gate)):
        outer = list(spans.expert_inputs(op, e, inner=False))
        inner = list(spans.expert_inputs(op, e, inner=True))
        for s in range(2):
            rows = routes[s][:, e].nonzero()[0]
            counted += len(rows)
            assert (outer[s] == xs[s][rows]).all()
            y = torch.from_numpy(inner[s]) @ reference.weight(op.down[e]).T
            out[s][rows] += torch.from_numpy(routes[s][rows, e, None]) * y
    assert counted == 2 * 40 * int((routes[0][0] > 0).sum())
    spans.run(i, i + 1)
    for found, x in zip(out, spans.inputs(op.out), strict=True):
        assert np.allclose(found.numpy(), x, rtol=1e-4, atol=1e-5)
    spans.close()


def test_groups(folder: Path, tmp_path: Path) -> None:
    """Layers in the order in which their inputs are known; a block reads one value of the others."""
    program = build_program(open_checkpoint(folder))
    wanted = {whole(op.weight.tensor)[0] for op in program.ops if isinstance(op, Linear)}
    found = [
        [tuple(n.split(".")[-2] for n in g.layers) for g in b.groups]
        for b in blocks(program, wanted)
    ]
    attention = [("q_proj", "k_proj", "v_proj"), ("o_proj",)]
    mlp = [("gate_proj", "up_proj"), ("down_proj",)]
    assert found == [attention, mlp, attention, mlp, [("lm_head",)]]
    save_family(FAMILIES["phi3"], tmp_path / "fused")
    program = build_program(open_checkpoint(tmp_path / "fused"))
    wanted = {whole(op.weight.tensor)[0] for op in program.ops if isinstance(op, Linear)}
    first = blocks(program, wanted)[0].groups[0].layers
    assert [n.split(".")[-2] for n in first] == ["qkv_proj"]


def test_weights_are_held_while_they_are_used(
    text: Path, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that share an input, some of which are computed after others have theirs: the same
    bytes as if all of a block's weights were held to its end."""
    save_family(FAMILIES["phi"], tmp_path / "parallel")
    for name, file in beside(as_folder(open_checkpoint(gguf))).items():
        if "tokenizer" in name:
            (tmp_path / "parallel" / name).write_bytes(file.make())  # type: ignore[union-attr]
    quantized(tmp_path / "parallel", "gptq-3", tmp_path / "a", text)
    monkeypatch.setattr(Calibration, "_forget", lambda self, at: None)
    quantized(tmp_path / "parallel", "gptq-3", tmp_path / "b", text)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize(("most", "step"), [(16, 1), (3, 2), (1, 4)])
def test_scales_are_looked_for_with_some_of_the_sequences(
    most: int, step: int, folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`SEARCH_WITH` of the four at most, evenly."""
    seen = []

    def search(program: Program, wanted: Any, tokens: np.ndarray, *rest: Any) -> dict[int, Any]:
        seen.append(tokens)
        return {}

    monkeypatch.setattr(calibrated, "SEARCH_WITH", most)
    monkeypatch.setattr(scaled, "find_scales", search)
    quantized(folder, "awq-4", tmp_path / "out", text)
    tokenizer = load_tokenizer(open_checkpoint(folder))
    tokens = token_blocks(split("calibration", text), tokenizer, 96, 4)
    assert len(seen) == 1 and np.array_equal(seen[0], tokens[::step])


def test_tokens_are_told_and_blocks_fit_the_context(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrated, "LENGTH", 1 << 20)
    checkpoint, told = open_checkpoint(folder), list[str]()
    context = build_program(checkpoint).context
    job = job_of(checkpoint, find_recipe("gptq-4"), tmp_path / "out", data=text)
    monkeypatch.setattr(calibrated, "SEQUENCES", 1)
    job.run(say=told.append)
    assert f"layers see {context:,} tokens of text" in told


def test_scales_are_learned_with_eight_blocks(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrated, "SEQUENCES", 8)
    short, words = tmp_path / "short.jsonl", text.read_text()[100:]
    parts = [words[i : i + 150] for i in range(0, 1200, 150)]
    short.write_text("\n".join(json.dumps({"text": p}) for p in parts))
    with pytest.raises(UsageError, match="8 of 96 take 768, and as many again") as e:
        quantized(folder, "distilled-4", tmp_path / "out", short)
    assert e.value.suggestions


def test_a_model_writes_only_when_it_is_asked(
    folder: Path, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(_: Path) -> list[str]:
        raise AssertionError

    monkeypatch.setattr(written, "written", asked)
    for model, recipe, out in ((folder, "gptq-4", "out"), (gguf, "q8_0", "out.gguf")):
        checkpoint = open_checkpoint(model)
        job = job_of(checkpoint, find_recipe(recipe), tmp_path / out, data=Path("self"))
        assert job.forecast().bytes_after
        with pytest.raises(AssertionError):
            job.run()
