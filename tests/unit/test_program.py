"""What programs declare: inputs, what each layer keeps, the values they give; and trees of tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from octavo.backends.base import ProgramOptions, Span, StepInput, StepLimits
from octavo.backends.cpu import load, lower
from octavo.backends.torch.reference import Reference
from octavo.checkpoint import open_checkpoint
from octavo.errors import Unsupported
from octavo.models import build_program
from octavo.program import (
    Branch,
    Builder,
    LayerCache,
    Linear,
    Program,
    Softcap,
    Value,
    branches,
    listing,
)
from tests.small_models import Small, save_hf


def program(tmp_path: Path, small: Small | None = None) -> Program:
    save_hf(small or Small(), tmp_path)
    return build_program(open_checkpoint(tmp_path))


def test_inputs_of_a_decoder(tmp_path: Path) -> None:
    p = program(tmp_path)
    found = {i.name: (i.type, i.shape, i.optional) for i in p.inputs}
    assert found == {
        "ids": ("int32", ("T",), False),
        "positions": ("int32", ("T",), False),
        "embeddings": ("float32", ("E", 64), True),
        "parents": ("int32", ("T",), True),
        "reach": ("int32", ("T",), True),
    }
    assert not p.takes("token_type_ids")


def test_inputs_of_an_encoder(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
    config = BertConfig(vocab_size=90, num_hidden_layers=2, max_position_embeddings=40, **sizes)
    BertModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    p = build_program(open_checkpoint(tmp_path))
    assert [i.name for i in p.inputs] == ["ids", "positions", "token_type_ids"]
    assert p.hidden == p.output and p.output.selected


def test_cache_of_layers_with_windows(tmp_path: Path) -> None:
    p = program(tmp_path, Small(family="gemma3", heads=4, kv_heads=1, layers=7, head_dim=40))
    windowed, full = LayerCache(1, 40, 24), LayerCache(1, 40)
    assert p.cache == (windowed,) * 5 + (full, windowed)
    lines = [line for line in listing(p).splitlines() if line.startswith("; cache")]
    assert lines == [
        "; cache layers 0 to 4: 1 x 40, window 24",
        "; cache layer 5: 1 x 40",
        "; cache layer 6: 1 x 40, window 24",
    ]


def test_output_and_hidden_are_named(tmp_path: Path) -> None:
    p = program(tmp_path)
    head = next(op for op in p.ops if op.out == p.output)
    assert isinstance(head, Linear) and head.x == p.hidden


def test_a_program_may_give_any_selected_value(tmp_path: Path) -> None:
    """Nothing is inferred from the last operation: here states are what a softcap gives."""
    save_hf(Small(), tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    b = Builder(checkpoint)
    x = b.embed("model.embed_tokens.weight", 320, 64)
    attended = b.attention(x, x, x, layer=2, heads=4, kv_heads=4, scale=0.25)
    y = b.softcap(
        b.select_rows(b.linear(attended, "model.layers.0.self_attn.q_proj.weight", 64)), 5
    )
    logits = b.linear(y, "model.embed_tokens.weight", 320)
    with pytest.raises(ValueError, match="selected rows"):
        b.build(64, x)
    p = b.build(64, logits, hidden=y)
    assert (p.hidden, p.output) == (y, logits)
    assert isinstance(p.ops[y.id], Softcap)
    assert p.cache == (LayerCache(0, 0), LayerCache(0, 0), LayerCache(4, 16))
    assert [i.name for i in p.inputs] == ["ids", "parents", "reach"]


def test_branches_of_a_tree() -> None:
    assert branches([-1, 0, 1, 2]) == [Branch(0, 4, ())]
    assert branches([-1, 0, 1, 0, 3, 3, -1, 6]) == [
        Branch(0, 3, ()),
        Branch(3, 2, (0,)),
        Branch(5, 1, (0, 3)),
        Branch(6, 2, ()),
    ]
    assert branches([]) == []


@pytest.mark.parametrize("parents", [[0], [1, -1], [-1, 0, -1, 1], [-1, -2], [-1, 1]])
def test_trees_that_are_not_depth_first_are_refused(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="depth first"):
        branches(parents)


def stacked(tmp_path: Path, hidden: str) -> tuple[Program, Value]:
    """A program whose hidden states are an early value, with more of the same width after it."""
    save_hf(Small(), tmp_path)
    b = Builder(open_checkpoint(tmp_path))
    square, norm = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
    x = b.embed("model.embed_tokens.weight", 320, 64)
    attended = b.attention(x, x, x, layer=0, heads=4, kv_heads=4, scale=0.25)
    early = b.select_rows(b.add(x, b.linear(attended, square, 64)))
    y = early
    for _ in range(3):
        y = b.linear(b.rms_norm(y, norm, 1e-5), square, 64)
    gate = b.linear(b.rms_norm(y, norm, 1e-5), "model.layers.0.mlp.gate_proj.weight", 96)
    y = b.linear(b.activate(gate, "silu"), "model.layers.0.mlp.down_proj.weight", 64)
    logits = b.linear(b.rms_norm(y, norm, 1e-5), "model.embed_tokens.weight", 320)
    value = early if hidden == "early" else gate
    return b.build(64, logits, hidden=value), value


def test_hidden_states_outlive_the_step(tmp_path: Path) -> None:
    """Their buffer is not given to later values of the same width."""
    program, value = stacked(tmp_path, "early")
    ids = [5, 9, 200, 31]
    expected = Reference(replace(program, output=value)).logits(ids).numpy()
    executable = load(lower(program), ProgramOptions(StepLimits(16, 16, 4), 2, "f32"))
    rows = np.arange(4, dtype=np.int32)
    spans, table = [Span(0, 4, 0, 0)], np.zeros(1, np.int32)
    executable.step(StepInput(np.array(ids, np.int32), rows, spans, table, rows))
    assert np.abs(executable.hidden(0, 4) - expected).max() < 1e-4
    logits = Reference(program).logits(ids).numpy()
    assert np.abs(executable.logits(4) - logits).max() < 2e-2


def test_hidden_states_inside_a_fused_operation_are_refused(tmp_path: Path) -> None:
    program, value = stacked(tmp_path, "gate")
    with pytest.raises(Unsupported, match=f"%{value.id}"):
        lower(program)
