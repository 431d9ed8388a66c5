"""Every hyperparameter that GGUF files can have: obeyed, refused by name, or known to do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest

from octavo.checkpoint import Checkpoint, open_checkpoint
from octavo.errors import OctavoError
from octavo.models import build_program
from tests.families import FAMILIES, save_family, save_gguf

ARCHES = {family.arch: name for name, family in reversed(FAMILIES.items()) if family.arch}
# Of the tokenizer and the pooling, which others read, and of how a file came to be.
WITHOUT_EFFECT = {"vocab_size", "pooling_type", "tensor_data_layout", "rope.scaling.finetuned"}
# Of a rescaling that the file does not ask for.
NOT_SCALED = {"rope.scaling.original_context_length"}
UNUSED = {"qwen3moe": {"feed_forward_length"}}  # where all layers have experts
# Which the tensors do not have then.
SIZES = {
    "context_length", "embedding_length", "block_count", "feed_forward_length", "expert_count",
    "expert_feed_forward_length", "attention.head_count", "attention.head_count_kv",
    "attention.key_length",
}  # fmt: skip
FLAGS = {
    "use_parallel_residual", "expert_weights_norm", "swin_norm", "attention.causal",
    "rope.scaling.finetuned",
}  # fmt: skip
ON = {"attention.causal", "expert_weights_norm"}  # the latter in qwen3moe
CHOICES = {
    "tensor_data_layout": "Meta AI original pth", "rope.scaling.type": "longrope",
    "expert_gating_func": 2,
}  # fmt: skip
ARRAYS = {"rope.dimension_sections": [4, 4], "attention.sliding_window_pattern": [True, False]}


def named() -> Iterator[str]:
    """The keys that the gguf package knows for a model, without the architecture's name."""
    for group in (gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope):
        for name, key in vars(group).items():
            if not name.startswith("_") and isinstance(key, str):
                yield key.removeprefix("{arch}.").replace("{dense}", "dense_2")


def with_key(checkpoint: Checkpoint, key: str, value: Any) -> Checkpoint:
    full = f"{checkpoint.architecture}.{key}"
    return replace(checkpoint, metadata=dict(checkpoint.metadata) | {full: value})


def value_of(checkpoint: Checkpoint, key: str) -> Any:
    """Something else than the file says, or than a file without the key means."""
    now = checkpoint.metadata.get(f"{checkpoint.architecture}.{key}")
    if key in FLAGS:
        usual = key == "attention.causal" or checkpoint.architecture == "qwen3moe"
        return not (now if now is not None else usual and key in ON)
    if now is not None and not isinstance(now, list | str):
        return now * 2
    return CHOICES.get(key, ARRAYS.get(key, 3))


def meaning(checkpoint: Checkpoint) -> str:
    """The program with all its numbers."""
    program = build_program(checkpoint)
    return repr((program.ops, program.context))


@pytest.mark.parametrize("arch", ARCHES)
def test_every_key(arch: str, tmp_path: Path) -> None:
    family = FAMILIES[ARCHES[arch]]
    save_family(family, tmp_path)
    save_gguf(family, tmp_path, tmp_path / "model.gguf")
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    plain = meaning(checkpoint)
    ignored, refused, obeyed, unnamed = set(), set(), set(), {}
    for key in named():
        try:
            other = meaning(with_key(checkpoint, key, value_of(checkpoint, key)))
        except OctavoError as e:
            refused.add(key)
            if not any(word in str(e) for word in (key, "rope" if "rope." in key else key)):
                unnamed[key] = str(e)
            continue
        (ignored if other == plain else obeyed).add(key)
    print(f"{arch}: {len(obeyed)} obeyed, {len(refused)} refused")
    assert unnamed.keys() <= SIZES, unnamed
    odd = [e for e in unnamed.values() if "tensor" not in e and "heads" not in e]
    assert not odd
    rotated, scaled = "rope.freq_base" in obeyed, f"{arch}.rope.scaling.type" in checkpoint.metadata
    nothing = WITHOUT_EFFECT | UNUSED.get(arch, set())
    assert ignored == nothing | (NOT_SCALED if rotated and not scaled else set())
    assert {"logit_scale", "attention.scale", "use_parallel_residual", "swin_norm"} <= refused


def test_what_belongs_to_others_is_left_alone(tmp_path: Path) -> None:
    save_family(FAMILIES["llama"], tmp_path)
    save_gguf(FAMILIES["llama"], tmp_path, tmp_path / "model.gguf")
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    others = {
        "general.quantized_by": "someone", "quantize.imatrix.file": "x", "split.count": 1,
        "tokenizer.chat_template": "x", "general.sampling.temp": 0.7, "mradermacher.quantize_version": "2",
    }  # fmt: skip
    metadata = dict(checkpoint.metadata) | others
    assert meaning(replace(checkpoint, metadata=metadata)) == meaning(checkpoint)
