"""`octavo plan` says what stored weights become in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.test_formats import linears
from tests.quantized_models import WRITERS, quantize_folder
from tests.small_models import Small, save_hf
from tests.ux.test_command_line import octavo


@pytest.mark.parametrize(
    ("format", "line"),
    [
        ("gptq-3", "21 matrices as INT4_MIN, 3 bits a code in the file"),
        ("ct-pack-6-asym", "21 matrices as INT8_MIN, 6 bits a code in the file"),
        ("awq", "21 matrices as INT4_MIN, 4 bits a code in the file"),
    ],
)
def test_plan(format: str, line: str, tmp_path: Path) -> None:
    save_hf(Small(heads=4, kv_heads=2, head_dim=32, hidden=128, ffn=256), tmp_path)
    quantize_folder(tmp_path, WRITERS[format], linears)
    result = octavo("plan", str(tmp_path))
    assert result.returncode == 0
    assert line in result.stdout
