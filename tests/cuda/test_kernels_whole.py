"""Every launch of whole models by kernels in Triton's interpreter, and in torch on the same inputs.

Kernels compute the model; what each of them leaves is compared with what the operation in torch
leaves of copies. So no difference adds up, nor tips a router, and limits are those of one operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from torch import Tensor

from octavo.backends.cuda import host, kernels, memory
from tests.cuda.both import assert_close
from tests.cuda.gpu import interpreted, moved
from tests.cuda.loaded import load, open_program, prompt
from tests.families import FAMILIES, Family, save_family
from tests.families import save_gguf as save_family_gguf
from tests.small_models import Small, save_gguf

FP32 = 2.0**-16  # 256 products of size 1 in a row, each with an error of 2^-24
BF16 = 2.0**-9  # of a number that is rounded
SMALL = {
    "q4_0": Small(heads=4, kv_heads=2, head_dim=16, layers=1),
    "q4_k": Small(heads=4, kv_heads=1, head_dim=64, hidden=256, ffn=256, layers=1),
}
KEPT = {"attention": 4}  # scratch, which only kernels use


def tensors(name: str, args: tuple[Any, ...]) -> Iterator[Tensor]:
    """All that a launch can leave something in."""
    for place, arg in enumerate(args):
        if place == KEPT.get(name):
            continue
        for each in arg if isinstance(arg, tuple) else (arg,):
            if isinstance(each, Tensor):
                yield each


def compare(call: partial[None]) -> str:
    """One launch by both; its name."""
    name, args = call.func.__name__, moved(call.args, "cpu", {})
    assert call.func is getattr(kernels, name)
    call()
    getattr(host, name)(*args, **call.keywords)
    bound = FP32
    if name == "attention":  # means of values by weights that the kernel rounds
        bound += BF16 * float(args[1][:, 1].abs().max())
    for expected, got in zip(tensors(name, args), tensors(name, call.args), strict=True):
        assert_close(expected, got.cpu(), bound if expected.is_floating_point() else 0.0)
    return name


def compare_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """A prompt in two parts; the operations it takes."""
    interpreted(monkeypatch)
    executable = load(open_program(path), path, tokens=32, blocks=4)
    ids = np.random.default_rng(7).integers(3, 320, 30).tolist()
    found = set()
    monkeypatch.setattr(
        executable._replay, "run",
        lambda size, calls: found.update(compare(c) for c in calls if isinstance(c, partial)),
    )  # fmt: skip
    executable.step(prompt(ids[:17]))
    executable.step(prompt(ids[17:], 17))
    return found


def short(name: str) -> Family:
    """A family's model of two layers, of which windows are one."""
    family = FAMILIES[name]
    layers = "n_layer" if name == "gpt2" else "num_hidden_layers"
    return replace(family, settings=family.settings | {layers: 2})


@pytest.mark.parametrize("kind", SMALL)
def test_formats(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    save_gguf(SMALL[kind], path, getattr(Q, kind.upper()))
    assert {"embed", "rope_kv", "glu"} <= compare_all(path, monkeypatch)


def test_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes that become bf16 first, as with many rows."""
    monkeypatch.setattr(memory, "UNPACKED_TOKENS", 1)
    path = tmp_path / "m.gguf"
    save_gguf(SMALL["q4_0"], path, Q.Q4_0)
    assert "linear" in compare_all(path, monkeypatch)


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "mixtral"])
def test_families(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_family(short(name), tmp_path)
    assert {"linear", "attention"} <= compare_all(tmp_path, monkeypatch)


def test_gpt_oss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts in MXFP4 with biases, sinks, windows."""
    save_family(short("gpt-oss"), tmp_path)
    path = tmp_path / "m.gguf"
    save_family_gguf(FAMILIES["gpt-oss"], tmp_path, path, Q.MXFP4)
    assert {"route", "sort_pairs", "expert_linear", "expert_sum"} <= compare_all(path, monkeypatch)
