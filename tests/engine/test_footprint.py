"""The plan counts what loading allocates: to the byte, without weights, in no time."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from octavo.backends.base import Footprint, ProgramOptions, StepLimits
from octavo.backends.cpu.backend import CpuCompiled
from octavo.backends.cpu.executor import CpuExecutable
from octavo.checkpoint import Stored, Tensor
from octavo.engine.open import OpenModel, open_model
from tests.families import FAMILIES, save_family
from tests.small_models import Small, save_gguf, save_hf

LIMITS = StepLimits(64, 8, 12)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Tensors that cannot be read until this is undone."""

    def refuse(self: Tensor) -> np.ndarray:
        raise AssertionError(f"{self.name} was read")

    for kind in (Tensor, *subclasses(Tensor)):
        for method in ("raw", "vector"):
            if method in vars(kind):
                monkeypatch.setattr(kind, method, refuse)
    return monkeypatch


def subclasses(kind: type) -> list[type]:
    below = kind.__subclasses__()
    return below + [c for each in below for c in subclasses(each)]


def allocated(model: OpenModel, options: ProgramOptions) -> Footprint:
    executable = model.compiled.load(model.checkpoint, options)
    assert isinstance(executable, CpuExecutable)
    native = executable.model
    return Footprint(native.weight_bytes, native.buffer_bytes, native.cache_bytes)


def check(
    path: Path, options: ProgramOptions, unread: pytest.MonkeyPatch, lora: bool = False
) -> None:
    model = open_model(path, adapters=lora)
    assert isinstance(model.compiled, CpuCompiled)
    with pytest.raises(AssertionError, match="was read"):
        next(iter(model.checkpoint.tensors.values())).raw()
    counted = model.compiled.footprint(options)
    assert counted.cache == options.limits.blocks * model.compiled.block_bytes(options.kv_dtype)
    unread.undo()
    assert allocated(model, options) == counted
    assert min(counted.weights, counted.buffers, counted.cache) > 0


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("threads", [1, 3])
def test_caches_and_threads(
    kv_dtype: str, threads: int, tmp_path: Path, unread: pytest.MonkeyPatch
) -> None:
    save_hf(Small(heads=3, kv_heads=1, head_dim=24, hidden=96), tmp_path)
    check(tmp_path, ProgramOptions(LIMITS, threads, kv_dtype), unread)


@pytest.mark.parametrize(
    "name", ["qwen3-moe", "gpt-oss", "gpt2", "gemma3", "phi3-longrope", "opt-350m"]
)
def test_families(name: str, tmp_path: Path, unread: pytest.MonkeyPatch) -> None:
    save_family(FAMILIES[name], tmp_path)
    check(tmp_path, ProgramOptions(LIMITS, 2, "bf16"), unread)


@pytest.mark.parametrize("quant", [Q.Q4_0, Q.Q8_0, Q.MXFP4, Q.F16])
def test_quantized(quant: Q, tmp_path: Path, unread: pytest.MonkeyPatch) -> None:
    save_gguf(Small(heads=6, kv_heads=2, head_dim=16), tmp_path / "m.gguf", quant)
    check(tmp_path / "m.gguf", ProgramOptions(LIMITS, 2, "bf16"), unread)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_adapters_and_weights_packed_later(
    dtype: str, tmp_path: Path, unread: pytest.MonkeyPatch
) -> None:
    save_hf(Small(hidden=128, ffn=192, dtype=dtype), tmp_path)
    check(tmp_path, ProgramOptions(LIMITS, 2, "bf16", adapter_bytes=1 << 20), unread, lora=True)


def test_encoders(minilm: Path, unread: pytest.MonkeyPatch) -> None:
    check(minilm, ProgramOptions(StepLimits(512, 512, 64), 2, "f32"), unread)


def test_packed_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unread: pytest.MonkeyPatch
) -> None:
    """Whether they are written to a file or mapped from it."""
    save_hf(Small(hidden=128, dtype="bfloat16"), tmp_path / "m")
    with pytest.MonkeyPatch.context() as m:
        m.setenv("OCTAVO_CACHE", str(tmp_path))
        options = ProgramOptions(LIMITS, 2, "bf16", packed=True)
        check(tmp_path / "m", options, unread)
        model = open_model(tmp_path / "m")
        m.setattr(Stored, "raw", None)
        m.setattr(Stored, "vector", None)
        assert allocated(model, options) == model.compiled.footprint(options)


def test_large_models_are_counted_at_once(
    tmp_path: Path, smollm2: Path, unread: pytest.MonkeyPatch
) -> None:
    """A cache of more than a TiB takes no memory to count, and 64 threads are not started."""
    compiled = open_model(smollm2).compiled
    few, many = (ProgramOptions(StepLimits(512, 32, n), 64, "bf16") for n in (0, 1 << 24))
    began = time.process_time()
    small, large = compiled.footprint(few), compiled.footprint(many)
    assert time.process_time() - began < 0.3
    assert (small.weights, small.buffers) == (large.weights, large.buffers)
    assert large.cache == (1 << 24) * compiled.block_bytes("bf16") > 1 << 40


def test_sizes_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning takes time by the matrix, of which mixtures of experts have thousands."""
    save_family(FAMILIES["qwen3-moe"], tmp_path)
    model = open_model(tmp_path)
    asked: list[str] = []
    size = Stored.nbytes
    monkeypatch.setattr(
        Stored, "nbytes", property(lambda self: (asked.append(self.name), size.__get__(self))[1])
    )
    model.compiled.footprint(ProgramOptions(LIMITS, 1, "bf16"))
    assert len(asked) == len(set(asked)) > 20
