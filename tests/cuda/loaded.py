"""The CUDA backend on the CPU: programs behind the same lowering, with the operations in torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.backends.base import BLOCK, ProgramOptions, Span, StepInput, StepLimits
from octavo.backends.cuda import pack
from octavo.backends.cuda.backend import CudaBackend
from octavo.backends.cuda.executable import CudaExecutable
from octavo.checkpoint import open_checkpoint
from octavo.models import build_program
from octavo.program import Program


def load(program: Program, path: Path, tokens: int = 256, blocks: int = 32) -> CudaExecutable:
    """A program on the host's operations."""
    options = ProgramOptions(StepLimits(tokens, tokens, blocks), 1, "bf16", activations="bf16")
    found = CudaBackend().compile(program).load(open_checkpoint(path), options)
    assert isinstance(found, CudaExecutable)
    return found


def open_program(path: Path) -> Program:
    return build_program(open_checkpoint(path))


def prompt(ids: list[int], start: int = 0) -> StepInput:
    """A step of tokens that follow `start` others, in blocks 0, 1, 2, ..., all of them selected."""
    n = len(ids)
    return StepInput(
        np.array(ids, np.int32), np.arange(start, start + n, dtype=np.int32),
        [Span(0, n, start, 0)], np.arange(-(-(start + n) // BLOCK), dtype=np.int32),
        np.arange(n, dtype=np.int32),
    )  # fmt: skip


def logits(executable: CudaExecutable, ids: list[int], start: int = 0) -> np.ndarray:
    """Of all tokens."""
    executable.step(prompt(ids, start))
    return executable.logits(len(ids))


def without_rounding(patch: pytest.MonkeyPatch) -> None:
    """Keeps fp32 wherever bf16 is meant, so that what is left are mistakes."""
    patch.setitem(pack.TYPES, "bf16", torch.float32)
    patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
