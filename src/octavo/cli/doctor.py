"""octavo doctor."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click

from octavo.cli.numbers import count
from octavo.cli.options import json_flag
from octavo.cli.remote import Remote, admin_key_option, server_option
from octavo.cli.screen import say, say_json, table

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
@server_option("Say what is wrong with this server.")
@click.option(
    "--seconds",
    type=count(0, 3600),
    metavar="SECONDS",
    default=0,
    help="Look at the server for so long, up to an hour. [at all since its start]",
)
@admin_key_option
@json_flag
def doctor(server: str | None, seconds: int, admin_key: str | None, as_json: bool) -> None:
    """Describe this machine, ready to paste into a report; or say what is wrong with a server.

    octavo doctor --server http://127.0.0.1:8000. Exit code 1: something is wrong.
    """
    if server is None:
        _machine()
    elif not _examine(Remote(server, admin_key), seconds, as_json):
        sys.exit(1)


def _examine(server: Remote, seconds: int, as_json: bool) -> bool:
    """Prints what is wrong with a server. Returns True if nothing is. Raises UsageError."""
    from octavo.cli.diagnosis import findings, lately, look, threads, upstreams

    window = look(server, seconds)
    known = findings(window), upstreams(server, window), lately(server), threads(server.url)
    found = [one for each in known for one in each]
    if as_json:
        say_json(
            {
                "server": server.url,
                "seconds": window.seconds,
                "findings": [asdict(f) for f in found],
            }
        )
        return not found
    say(f"{server.url}  {window.seconds:,.0f} s looked at")
    for one in found:
        say(f"{one.severity}  {one.name}{f'  {one.model}' if one.model else ''}: {one.meaning}")
        say(f"  try: {one.mitigation}")
    if not found:
        say("nothing is wrong")
    return not found


def _machine() -> None:
    """Prints what this machine is."""
    from octavo.backends import describe_gpu, get_backend
    from octavo.engine.host import usable_threads

    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.split(":", 1) for line in info.split("\n\n")[0].splitlines() if ":" in line)
    names = {k.strip(): v.strip() for k, v in fields.items()}
    flags = set(names.get("flags", "").split())
    table(
        [
            ("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
            ("cpu", names.get("model name", platform.processor())),
            ("flags", " ".join(f for f in FLAGS if f in flags) or "none of note"),
            ("kernels", ", ".join(get_backend().kernels)),
            ("gpu", describe_gpu()),
            ("threads", usable_threads()),
            ("memory", _memory()),
            ("huge pages", _huge_pages()),
            ("python", sys.version.split()[0]),
            ("packages", ", ".join(f"{p} {v}" for p in PACKAGES if (v := _installed(p)) != "-")),
            ("compiler", _compiler()),
            ("cache", _cache()),
        ]
    )


def _memory() -> str:
    from octavo.engine.host import host_memory
    from octavo.engine.plan import size

    m = host_memory()
    whose = ", the limit of a control group" if m.limit else ""
    return f"{size(m.available)} available of {size(m.total)}{whose}"


def _compiler() -> str:
    """The first C++ compiler found, with its version."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            result = subprocess.run(
                [path, "--version"], capture_output=True, text=True, check=False
            )
            return result.stdout.partition("\n")[0] or name
    return "none; only a build from source needs one (apt install g++)"


def _cache() -> str:
    """The cache folder, whether it can be written to, and the free space of its disk."""
    from octavo.checkpoint.cache import cache_folder
    from octavo.errors import CacheError

    try:
        folder = cache_folder()
    except CacheError as e:
        return str(e)
    place = next(p for p in (folder, *folder.parents) if p.exists())
    shown = str(folder)
    if home := os.environ.get("HOME"):
        shown = shown.replace(home.rstrip("/") + "/", "~/", 1)  # it names the user
    state = "" if folder.exists() else ", not made yet"
    try:
        tempfile.TemporaryDirectory(dir=place).cleanup()
    except OSError:
        return f"{shown}: cannot be written to; OCTAVO_CACHE moves it"
    return f"{shown}, {shutil.disk_usage(place).free / 1e9:.1f} GB free{state}"


def _huge_pages() -> str:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    return text[text.find("[") + 1 : text.find("]")]
