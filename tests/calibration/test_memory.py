"""Rounding and converting take the memory of two layers, not that of the model."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from octavo.checkpoint import open_checkpoint
from octavo.checkpoint.base import TensorType
from octavo.checkpoint.dequantize import dequantize
from octavo.checkpoint.writer import NewTensor, write_folder
from octavo.compress.beside import beside
from octavo.compress.folder_view import as_folder
from tests.calibration.small import SMALL
from tests.small_models import save_gguf

MEMORY = """
import os, sys
from pathlib import Path
import numpy as np
from octavo.backends.torch.spans import Spans
from octavo.checkpoint import open_checkpoint
from octavo.compress.calibration import Calibration
from octavo.compress.conversion import Conversion
from octavo.compress.folder_job import FolderJob
from octavo.compress.journal import Journal
from octavo.compress.recipe_file import find_recipe
from octavo.compress.serving import peak_rss
from octavo.compress.steps import Importance

folder, out, what = sys.argv[1:]
c, out = open_checkpoint(Path(folder)), Path(out)
if what == "calibrate":
    job = FolderJob(c, find_recipe("gptq-4"), out, "gptq")
    tokens = np.random.default_rng(0).integers(0, 320, (2, 16), dtype=np.int32)
    seen = Calibration(c, job.program, job.linear, tokens, Importance(), Journal(out, {}))
    run = lambda: seen.run(lambda n: None)
elif what == "quantize":
    run = FolderJob(c, find_recipe("kv-int8"), out, "compressed-tensors").run
else:
    run = Conversion(c, out, "gguf").run
before = peak_rss(os.getpid())  # ru_maxrss is also that of the process this one was forked from
run()
print(c.nbytes, peak_rss(os.getpid()) - before)
"""


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A folder of 12 layers, and the bytes of one in fp32."""
    folder = tmp_path_factory.mktemp("big")
    wide = replace(SMALL, hidden=512, ffn=1536, heads=8, kv_heads=8, head_dim=64, layers=1)
    save_gguf(wide, folder / "one.gguf", Q.F32)
    one = as_folder(open_checkpoint(folder / "one.gguf"))
    rng = np.random.default_rng(0)
    tensors, layer = {}, 0
    for name, t in one.tensors.items():
        x = (np.array(dequantize(t)) + rng.standard_normal(t.shape) * 1e-3).astype(np.float16)
        copies = [name.replace("layers.0.", f"layers.{i}.") for i in range(12)]
        tensors |= {n: NewTensor.of(x, TensorType.F16) for n in copies}
        layer += t.nbytes if "layers.0." in name else 0
    config = dict(one.metadata) | {"num_hidden_layers": 12}
    write_folder(folder / "big", config, tensors, beside(one))
    return folder / "big", layer


@pytest.mark.parametrize("what", ["calibrate", "quantize", "convert"])
def test_memory(what: str, big: tuple[Path, int], tmp_path: Path) -> None:
    """A model of 12 layers takes the memory of two in fp32, beside what the first use of torch
    does, and not that of its file."""
    folder, layer = big
    out = tmp_path / ("out.gguf" if what == "convert" else "out")
    command = [sys.executable, "-c", MEMORY, str(folder), str(out), what]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    size, grown = map(int, told.split())
    assert size > 5 * layer and grown < 2 * layer + (24 << 20)
