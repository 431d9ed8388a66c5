"""Every kernel in the shapes of models, compiled for an H100: tensor cores where there are products,
everything in registers, and no more shared memory than a multiprocessor gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LINEAR = {"_linear", "_linear_many", "_expert_linear"}
PRODUCTS = LINEAR | {"_attention"}
SHARED = 227 * 1024


GROUPS = ("linear", "attention", "rope", "rows", "experts")


@pytest.fixture(scope="module")
def compilers() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """A process for each group, all at once: this one interprets kernels."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    started = {
        group: subprocess.Popen(
            [sys.executable, "-m", "tests.cuda.compiler", group], cwd=ROOT, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for group in GROUPS
    }  # fmt: skip
    yield started
    for process in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("group", GROUPS)
def test_compiled(group: str, compilers: dict[str, subprocess.Popen[str]]) -> None:
    out, errors = compilers[group].communicate()
    assert compilers[group].returncode == 0, errors[-2000:]
    found = [json.loads(line) for line in out.splitlines()]
    assert found
    for kernel in found:
        assert kernel["shared"] <= SHARED, kernel
        assert kernel["inner"] == 0, kernel
        assert max(kernel["LDL"], kernel["STL"]) <= spilled(kernel), kernel
        assert (kernel["HGMMA"] > 0) == (kernel["kernel"] in PRODUCTS), kernel
        assert kernel["HMMA"] == 0, kernel
        assert (kernel["UTMALDG"] > 0) == (kernel["kernel"] == "_linear_many"), kernel
        if kernel["kernel"] in LINEAR:  # codes are operands where they were loaded, and floats
            assert kernel["LDSM"] + kernel["I2FP"] == 0, kernel
            # those that there are divide: a pair by its choices, a program's number
            assert kernel["I2F"] == {"_expert_linear": 1, "_linear_many": 2}.get(
                kernel["kernel"], 0
            ), kernel
    assert {mode for kernel in found for mode in kernel["rounds"]} == {"rn"}  # to nearest


def spilled(kernel: dict[str, Any]) -> int:
    """Registers that may lie in local memory, where two accumulators leave few: with wide heads
    those of an item that are used before and after the loops over slices and keys; with 128 tokens
    or more a part of the sum of slices, while one of them is computed."""
    least = {"_attention": 128, "_linear_many": 128}.get(kernel["kernel"])
    return 64 if least is not None and kernel["width"] >= least else 0
