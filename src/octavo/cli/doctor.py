"""octavo doctor."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click

PACKAGES = (
    "octavo numpy tokenizers jinja2 msgspec starlette uvicorn uvloop httptools huggingface-hub "
    "torch transformers"
).split()
FLAGS = "avx2 fma f16c avx512f avx512bw avx512vl avx512_vnni avx512_bf16 avx_vnni amx_int8".split()


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


@click.command()
def doctor() -> None:
    """Describe this machine, ready to paste into a report."""
    from octavo import _native
    from octavo.checkpoint.hub import cache_folder
    from octavo.engine.plan import available_memory, size, usable_threads

    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.split(":", 1) for line in info.split("\n\n")[0].splitlines() if ":" in line)
    names = {k.strip(): v.strip() for k, v in fields.items()}
    flags = set(names.get("flags", "").split())
    rows = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": names.get("model name", platform.processor()),
        "flags": " ".join(f for f in FLAGS if f in flags) or "none of note",
        "kernels": ", ".join(_native.isas()),
        "threads": usable_threads(),
        "memory": f"{size(available_memory())} available",
        "huge pages": _huge_pages(),
        "python": sys.version.split()[0],
        "packages": ", ".join(f"{p} {v}" for p in PACKAGES if (v := _installed(p)) != "-"),
        "cache": "present" if cache_folder().exists() else "empty",
    }
    for key, value in rows.items():
        click.echo(f"{key:<11} {value}")


def _huge_pages() -> str:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    return text[text.find("[") + 1 : text.find("]")]
