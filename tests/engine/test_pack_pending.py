"""Weights that are packed after loading: logits are the same before, between and after."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from octavo import _native
from octavo.backends.cpu import executor
from octavo.backends.cpu.weights import deferred, weights_of
from octavo.engine.constraint import TokenTable
from octavo.engine.engine import Engine
from octavo.engine.events import Token
from octavo.engine.loader import load_executable, make_engine
from octavo.engine.open import open_model
from octavo.engine.plan import make_plan
from octavo.engine.request import Request, SamplingParams
from tests.conftest import Runner
from tests.small_models import Small, save_hf

# Rows of 200 features are packed at once; the last panel of 325 rows is not whole.
SMALL = Small(heads=4, kv_heads=2, head_dim=32, hidden=128, ffn=200, vocabulary=325, tied=False)
TEXTS = [[int(t) for t in np.random.default_rng(n).integers(3, 325, n)] for n in (1, 20, 300)]


def logits(runner: Runner) -> list[np.ndarray]:
    return [runner.logits(text) for text in TEXTS]


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_same_logits(dtype: str, isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_ISA", isa)
    monkeypatch.setattr(executor, "PACKED_BYTES", 20_000)  # the largest matrix takes several
    save_hf(replace(SMALL, dtype=dtype), tmp_path)
    runner = Runner(tmp_path)
    seen = [logits(runner)]
    while runner.executable.pack_pending():
        seen.append(logits(runner))
    assert len(seen) > 10
    for each in seen:
        assert all((a == b).all() for a, b in zip(each, seen[0], strict=True))


def test_what_is_deferred(tmp_path: Path) -> None:
    save_hf(replace(SMALL, dtype="bfloat16"), tmp_path)
    matrices = weights_of(open_model(tmp_path).compiled.lowered)[0]
    packed = [name for name, t in matrices.items() if not deferred(t)]
    assert len(packed) == SMALL.layers and all("down_proj" in name for name in packed)


def generated(engine: Engine) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    engine.add(Request(id="a", prompt=TEXTS[1], params=params))
    tokens = []
    while engine.has_work:
        tokens += [e.token for e in engine.step() if isinstance(e, Token)]
    return tokens


def test_steps_become_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step packs some more, until there is nothing left to do."""
    monkeypatch.setattr(executor, "PACKED_BYTES", 100_000)
    save_hf(replace(SMALL, dtype="bfloat16"), tmp_path)
    model = open_model(tmp_path)
    plan = make_plan(model.compiled, name="m")
    executable = load_executable(model, plan)
    engine = make_engine(model, executable, plan, TokenTable([], [], [2]))
    assert executable.pack_pending()
    first = generated(engine)
    assert len(first) == 40 and not executable.pack_pending()
    assert generated(engine) == first


SLACK = 8 << 20  # pages are of 2 MiB where the system has them


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_idle_engine_prepares_blocks(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So much memory past the blocks in use, no more, and without a change of what they hold."""
    ahead = 64 << 20
    monkeypatch.setattr(executor, "IDLE_PREFAULT", ahead)
    model = open_model(smollm2)
    plan = make_plan(model.compiled, name="m", context=256)
    executable = load_executable(model, plan)
    engine = make_engine(model, executable, plan, TokenTable([], [], [2]))
    while executable.pack_pending():  # what remains of quantized weights are norms
        pass
    first = generated(engine)
    before = resident()
    while engine.pack_pending():
        pass
    assert ahead - executor.PREFAULT - SLACK < resident() - before < ahead + SLACK
    assert not engine.pack_pending()
    assert generated(engine) == first


def test_a_request_does_not_wait_for_what_is_prepared_while_idle(smollm2: Path) -> None:
    """One that comes then takes the memory of its own blocks, and a little ahead."""
    model = open_model(smollm2)
    plan = make_plan(model.compiled, name="m", context=256)
    executable = load_executable(model, plan)
    engine = make_engine(model, executable, plan, TokenTable([], [], [2]))
    generated(make_engine(model, executable, plan, TokenTable([], [], [2])))  # takes buffers
    before = resident()
    assert engine.pack_pending()
    assert resident() - before < executor.PREFAULTED_BYTES + SLACK
    generated(engine)
    assert resident() - before < executor.PREFAULT + SLACK
    assert engine.pack_pending()
