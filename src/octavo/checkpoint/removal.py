"""Finds and deletes the files of a model in the caches."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.checkpoint.cache import cache_folders
from octavo.checkpoint.demo import BUNDLED, DEMOS
from octavo.checkpoint.huggingface import (
    download_mark,
    hub_cache,
    parse_hub_name,
    repository_folder,
)
from octavo.errors import CacheError, ModelNotFound


@dataclass(frozen=True)
class Removal:
    """Folders of one model, all inside a cache, and the bytes that deleting them frees."""

    name: str
    folders: tuple[Path, ...]
    bytes: int

    def run(self) -> None:
        """Deletes. Raises CacheError."""
        for folder in self.folders:
            try:
                _delete(self.name, folder)
            except OSError as e:
                raise CacheError(f"cannot delete {folder}: {e.strerror or e}") from None


def find_removal(name: str) -> Removal:
    """The model's folders in the caches. Raises ModelNotFound for whatever lies elsewhere."""
    folders: list[Path] = []
    hub = None if name in DEMOS else parse_hub_name(name)
    if name in DEMOS:
        folders = [root / name for root in cache_folders()]
    elif hub is not None and not hub.selection:
        folders = [repository_folder(hub.repo)]
    elif hub is not None:
        raise ModelNotFound(
            f"rm deletes a repository with all its files, not {hub.selection} alone",
            model=name,
            instead=(hub.repo,),
        )
    elif name in BUNDLED or _exists(name):
        raise ModelNotFound(
            f"{name} is not in a cache, and rm deletes nothing else", "octavo models"
        )
    inside = [hub_cache().resolve(), *(root.resolve() for root in cache_folders())]
    there = tuple(
        f for f in folders if f.is_dir() and not f.is_symlink() and f.resolve().parent in inside
    )
    if not there:
        raise ModelNotFound(f"no model {name!r} in the caches", "octavo models")
    return Removal(hub.repo if hub else name, there, sum(map(_size, there)))


def _exists(name: str) -> bool:
    """True if the name is a path of something; False for what is no path."""
    try:
        return Path(name).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long, no home, a null character
        return False


def _size(folder: Path) -> int:
    """Bytes of all files below a folder, without following links."""
    return sum(
        (Path(root) / file).lstat().st_size for root, _, files in os.walk(folder) for file in files
    )


def _delete(name: str, folder: Path) -> None:
    """Deletes a repository as the hub's own client does, anything else as a folder."""
    if folder.parent.resolve() == hub_cache().resolve():
        from huggingface_hub import scan_cache_dir

        cache = scan_cache_dir(hub_cache())
        for repo in cache.repos:
            if Path(repo.repo_path) == folder:
                only = replace(cache, repos=frozenset({repo}))  # copies have the same commits
                only.delete_revisions(*(r.commit_hash for r in repo.revisions)).execute()
        download_mark(name).unlink(missing_ok=True)
    if folder.exists():  # a demo, or a download that was interrupted before its first file
        shutil.rmtree(folder)
