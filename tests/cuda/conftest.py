"""Kernels run in Triton's interpreter here; it must be asked for before they are imported."""

from __future__ import annotations

import importlib.util
import os

os.environ["TRITON_INTERPRET"] = "1"
if importlib.util.find_spec("triton") is None:  # CPU builds of torch do not bring it
    collect_ignore_glob = ["test_kernels_*.py", "test_compile.py"]
