"""Names to files: the demo model, Hugging Face ids, folders and .gguf files.

Files are used where they lie: Hugging Face models in its standard cache, the demo in our own
(`octavo.checkpoint.cache`).
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.checkpoint.cache import cache_folder
from octavo.checkpoint.demo import BUNDLED, DEMOS, fetch_demo, find_demo
from octavo.checkpoint.folders import choose, gguf_models, is_model_folder
from octavo.checkpoint.huggingface import hub_cache, hub_model, parse_hub_name
from octavo.checkpoint.names import suggest
from octavo.checkpoint.progress import Advance, ProgressBar
from octavo.errors import CacheError, ModelNotFound

__all__ = [
    "BUNDLED", "DEMOS", "Installed", "Located", "cache_folder", "installed", "locate",
    "located_here", "models_in", "names", "no_progress",
]  # fmt: skip

DEPTH = 3  # of folders that are looked into for models


@dataclass(frozen=True)
class Located:
    """A model on this machine. `sampling`: parameters for requests that name none."""

    path: Path
    name: str
    aliases: tuple[str, ...] = ()
    sampling: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Installed:
    """A model on this machine."""

    name: str
    bytes: int
    path: Path


def no_progress(what: str, total: int) -> AbstractContextManager[Advance]:
    return nullcontext(lambda n: None)


def locate(name: str, *, offline: bool = False, progress: ProgressBar = no_progress) -> Located:
    """Finds a model, fetching it if need be.

    Raises ModelNotFound when the name means nothing here, or cannot be fetched; CacheError when
    there is no room for it.
    """
    if name in DEMOS:
        return _demo(name, offline, progress)
    if (bundled := BUNDLED.get(name)) is not None:
        return Located(bundled.path, name, (), bundled.sampling)
    path = _file_or_folder(name)
    if path is not None:
        stem = path.stem if path.suffix == ".gguf" else path.resolve().name
        return Located(path, stem)
    if hub := parse_hub_name(name):
        return Located(hub_model(hub, offline), str(hub))
    raise _unknown(name)


def _demo(name: str, offline: bool, progress: ProgressBar) -> Located:
    path = find_demo(name)
    if path is None and offline:
        raise ModelNotFound(
            f"{name} is not in the cache, and --offline forbids fetching it", f"octavo pull {name}"
        )
    path = path or fetch_demo(name, progress)
    return Located(path, name, (path.stem,), DEMOS[name].sampling)


def _file_or_folder(name: str) -> Path | None:
    """Resolves a path; None if it is none. `FOLDER:QUANT` selects one of a folder's GGUF files."""
    try:
        path = Path(name).expanduser()
        folder, colon, selection = name.rpartition(":")
        if name and path.is_dir():
            return _model_of(path, name)
        if name and path.exists():
            return _file(path)
        inside = Path(folder).expanduser()
        if not colon or not folder or not inside.is_dir():
            return None
    except (OSError, RuntimeError, ValueError):  # too long, no home, a null character
        return None
    files = [str(f.relative_to(inside)) for f in inside.rglob("*.gguf")]
    if chosen := choose(files, selection):
        return inside / chosen
    raise ModelNotFound(f"{folder} has no {selection} file{_listing(gguf_models(files))}")


def _file(path: Path) -> Path:
    if path.suffix == ".safetensors":
        raise ModelNotFound(
            f"{path} is one file of a model; name the folder it lies in",
            model=str(path),
            instead=(str(path.parent),),
        )
    return path


def _model_of(folder: Path, name: str) -> Path:
    """The folder itself, or its one GGUF model. Raises ModelNotFound where there are several."""
    if is_model_folder(folder):
        return folder
    models = gguf_models(f.name for f in folder.glob("*.gguf"))
    if len(models) == 1:
        return folder / models[0]
    if not models:
        return folder  # whoever opens it says what it lacks
    raise ModelNotFound(
        f"{name} holds {len(models)} models{_listing(models)}",
        model=name,
        instead=tuple(str(Path(name) / m) for m in models),
    )


def _listing(names: list[str]) -> str:
    return f": {', '.join(names)}" if names else ""


def _unknown(name: str) -> ModelNotFound:
    """The error for an unknown model name, with suggestions."""
    if name.endswith((".gguf", "/")) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        return ModelNotFound(f"no file or folder {name!r}")
    return ModelNotFound(
        f'no model named "{name}": a model is the demo name smollm2, a Hugging Face id '
        "(org/name[:quant]), a folder or a .gguf file",
        model=name,
        instead=suggest(name, names()) or tuple(DEMOS),
    )


# -- what is here -----------------------------------------------------------------------------


def names() -> list[str]:
    """Names of the demos and of models in the hub's cache. Fast enough for shell completion."""
    here = sorted(
        f.name.removeprefix("models--").replace("--", "/", 1)
        for f in hub_cache().glob("models--*--*")
    )
    return [*DEMOS, *BUNDLED, *here]


def models_in(folder: Path) -> list[Located]:
    """Every model below a folder: model folders and GGUF files, named by their paths in it."""
    found = []
    for root, folders, files in os.walk(folder, followlinks=True):
        place = Path(root)
        if len(place.relative_to(folder).parts) >= DEPTH:
            folders.clear()
        paths = [place / file for file in gguf_models(files)]
        if place != folder and is_model_folder(place):
            paths.append(place)
        found += [Located(path, _name_in(folder, path)) for path in paths]
    return sorted(found, key=lambda each: each.name)


def _name_in(folder: Path, path: Path) -> str:
    name = path.relative_to(folder)
    return str(name.with_suffix("") if name.suffix == ".gguf" else name)


def located_here(known: Collection[str]) -> list[Located]:
    """The models in the caches that are complete, without those of known names."""
    found = []
    for name in (n for n in names() if n not in known):
        with suppress(ModelNotFound, CacheError):
            found.append(locate(name, offline=True))
    return found


def installed() -> list[Installed]:
    """Every model in the caches, and those that come with this package."""
    demos = [(name, find_demo(name)) for name in DEMOS]
    here = [Installed(name, path.stat().st_size, path) for name, path in demos if path]
    bundled = [Installed(name, model.size, model.path) for name, model in BUNDLED.items()]
    return here + bundled + _hub_models()


def _hub_models() -> list[Installed]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        cache: Any = scan_cache_dir(hub_cache())
    except (CacheNotFound, OSError, ValueError):
        return []
    return [
        Installed(r.repo_id, r.size_on_disk, Path(r.repo_path))
        for r in sorted(cache.repos, key=lambda r: str(r.repo_id))
        if r.repo_type == "model"
    ]
