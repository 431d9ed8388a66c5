"""Adapters merged into weights: PEFT's tensors, and the logits of the adapter that is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.backends.torch.reference import Reference
from octavo.checkpoint import Checkpoint, open_checkpoint
from octavo.checkpoint.base import TensorType
from octavo.checkpoint.dequantize import dequantize
from octavo.checkpoint.writer import NewTensor, write_folder
from octavo.compress.conversion import plain_config
from octavo.compress.counterparts import in_order
from octavo.compress.folder_view import as_folder
from octavo.compress.merge import Merge, Merged
from octavo.errors import OctavoError, UsageError
from octavo.models import build_program
from tests.families import FAMILIES, save_family, save_gguf
from tests.parity.test_peft import CASES, LLAMA, trained
from tests.parity.test_reference import LIMIT
from tests.quantized_models import gptq, quantize_folder

IDS = np.random.default_rng(4).integers(3, 320, 60).tolist()
# W + s (B A): a rank of up to 20 products in fp32, in another order than PEFT's.
SUMMED = 20 * 2.0**-24 * 8
CHOSEN = ["llama-patterns", "llama-rslora", "phi3-fused", "gpt2", "starcoder2", "opt"]


def merge(checkpoint: Checkpoint, adapters: list[Path], output: Path) -> Merged:
    return Merge(checkpoint, adapters, output).run()


@pytest.mark.parametrize("case", CHOSEN)
def test_equal_to_peft(case: str, tmp_path: Path) -> None:
    """PEFT's merge_and_unload has the same weights, and transformers computes the same with ours."""
    from transformers import AutoModelForCausalLM

    family, modules, options = CASES[case]
    model = save_family(FAMILIES[family], tmp_path / "model")
    adapted = trained(model, tmp_path / "adapter", modules, options)
    with torch.inference_mode():
        served = adapted(torch.tensor([IDS])).logits[0]
    merged = merge(open_checkpoint(tmp_path / "model"), [tmp_path / "adapter"], tmp_path / "out")
    assert merged.layers == sum(".lora_A." in n for n, _ in adapted.named_parameters())
    adapted.merge_and_unload().save_pretrained(tmp_path / "peft")
    ours, theirs = open_checkpoint(tmp_path / "out"), open_checkpoint(tmp_path / "peft")
    before = open_checkpoint(tmp_path / "model")
    assert ours.tensors.keys() == theirs.tensors.keys()
    changed = 0
    for name, tensor in theirs.tensors.items():
        a, b = dequantize(ours.tensors[name]), dequantize(tensor)
        assert np.abs(a - b).max() <= SUMMED
        changed += not np.array_equal(a, dequantize(before.tensors[name]))
    assert changed == merged.layers
    ids = Reference(build_program(ours)).logits(IDS)
    assert (ids - served).abs().max().item() <= LIMIT
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.inference_mode():
        assert (loaded(torch.tensor([IDS])).logits[0] - served).abs().max().item() <= LIMIT


def test_sixteen_bits_round_once(tmp_path: Path) -> None:
    """Weights of a bf16 model are the sum in fp32, rounded to bf16 once."""
    model = save_family(FAMILIES["llama"], tmp_path / "plain")
    trained(model, tmp_path / "adapter", LLAMA, {})
    half = type(model).from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "model")
    merge(open_checkpoint(tmp_path / "model"), [tmp_path / "adapter"], tmp_path / "out")
    wide = type(model).from_pretrained(tmp_path / "model", dtype=torch.float32)
    wide.save_pretrained(tmp_path / "wide")
    merge(open_checkpoint(tmp_path / "wide"), [tmp_path / "adapter"], tmp_path / "sum")
    rounded, sums = open_checkpoint(tmp_path / "out"), open_checkpoint(tmp_path / "sum")
    for name, tensor in sums.tensors.items():
        assert rounded.tensors[name].type is TensorType.BF16
        expected = torch.from_numpy(dequantize(tensor)).bfloat16().float().numpy()
        assert np.array_equal(dequantize(rounded.tensors[name]), expected)


def test_columns_in_another_order(tmp_path: Path) -> None:
    """GPTQ with act-order: the adapter is added to the values that the codes stand for, in order."""
    model = save_family(FAMILIES["llama"], tmp_path / "model")
    trained(model, tmp_path / "adapter", LLAMA, {})
    values = quantize_folder(
        tmp_path / "model", gptq(group=32, act_order=True), lambda name: ".layers." in name
    )
    source = open_checkpoint(tmp_path / "model")
    assert sum(t.order is not None for t in source.tensors.values()) == len(values)
    plain = {n: NewTensor.of(in_order(t), TensorType.F32) for n, t in source.tensors.items()}
    write_folder(tmp_path / "plain", plain_config(source, source, TensorType.F16), plain)
    for name in ("model", "plain"):
        merge(open_checkpoint(tmp_path / name), [tmp_path / "adapter"], tmp_path / f"{name}-out")
    ours, sums = (open_checkpoint(tmp_path / f"{name}-out").tensors for name in ("model", "plain"))
    for name, tensor in sums.items():
        x = torch.from_numpy(dequantize(tensor))
        expected = x.bfloat16().float() if name.removesuffix(".weight") in values else x
        assert np.array_equal(dequantize(ours[name]), expected.numpy())


def test_several_add_up_and_a_gguf_file_becomes_a_folder(tmp_path: Path) -> None:
    model = save_family(FAMILIES["llama"], tmp_path / "model")
    save_gguf(FAMILIES["llama"], tmp_path / "model", tmp_path / "model.gguf")
    trained(model, tmp_path / "one", LLAMA, {})
    source = open_checkpoint(tmp_path / "model.gguf")
    merge(source, [tmp_path / "one", tmp_path / "one"], tmp_path / "twice")
    merge(open_checkpoint(tmp_path / "model"), [tmp_path / "one"], tmp_path / "once")
    merge(open_checkpoint(tmp_path / "once"), [tmp_path / "one"], tmp_path / "again")
    twice, again = open_checkpoint(tmp_path / "twice"), open_checkpoint(tmp_path / "again")
    assert twice.tensors.keys() == again.tensors.keys() == as_folder(source).tensors.keys()
    for name, tensor in again.tensors.items():
        assert np.array_equal(dequantize(twice.tensors[name]), dequantize(tensor))
    assert (tmp_path / "twice" / "tokenizer.json").exists()


def test_adapters_of_other_models_are_refused(tmp_path: Path) -> None:
    model = save_family(FAMILIES["llama"], tmp_path / "model")
    trained(model, tmp_path / "adapter", LLAMA, {})

    def refused(other: str) -> OctavoError:
        save_family(FAMILIES[other], tmp_path / other)
        with pytest.raises(UsageError) as error:
            merge(open_checkpoint(tmp_path / other), [tmp_path / "adapter"], tmp_path / "out")
        return error.value

    found: dict[str, Any] = {name: str(refused(name)) for name in ("gpt2", "qwen2-mqa")}
    assert "does not have" in found["gpt2"] and "is for weights of" in found["qwen2-mqa"]
    assert not (tmp_path / "out").exists()
