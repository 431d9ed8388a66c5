"""Models of the Hugging Face hub: their names, the standard cache, and downloads that are finished.

A model that is whole in the cache is used without the network. A download leaves a mark that says
whether it was finished, so that one that was interrupted is completed at the next start.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.checkpoint.cache import cache_folder, need_space, unwritable, writing
from octavo.checkpoint.folders import choose, is_model_folder, missing, mmproj_files, parts
from octavo.checkpoint.progress import ProgressBar
from octavo.errors import ModelNotFound, OctavoError

_ID = re.compile(r"^([A-Za-z0-9][\w.-]*/[\w.-]+)(?::([\w./-]+))?$", re.ASCII)
_HOST = re.compile(r"^((https?://)?(www\.)?(huggingface\.co|hf\.co)/|hf://)", re.IGNORECASE)
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)
BEGUN, FINISHED = "begun", "finished"
_SIDE_FILES = (".json", ".jinja", ".txt", ".model", ".tiktoken")


@dataclass(frozen=True)
class HubName:
    """A repository, and which of its files (a quantization or a path) and revisions is meant."""

    repo: str
    selection: str = ""
    revision: str = "main"

    def __str__(self) -> str:
        return f"{self.repo}:{self.selection}" if self.selection else self.repo


def parse_hub_name(text: str) -> HubName | None:
    """`org/name[:quant-or-file]`, or an address of the hub's web pages. None if it is neither."""
    host = _HOST.match(text)
    if not host:
        found = _ID.match(text)
        if not found or (not found[2] and text.endswith(".gguf")):
            return None
        return HubName(found[1], found[2] or "")
    pieces = re.split(r"[?#]", text[host.end() :])[0].strip("/").split("/")
    found = _ID.match("/".join(pieces[:2]))
    if not found or pieces[0] in ("datasets", "spaces", "api"):
        return None
    revision = pieces[3] if len(pieces) > 3 and pieces[2] in ("tree", "blob", "resolve") else "main"
    file = "/".join(pieces[4:])
    return HubName(found[1], found[2] or (file if file.endswith(".gguf") else ""), revision)


def hub_cache() -> Path:
    """The standard cache of the hub's own client."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repository_folder(repo: str) -> Path:
    return hub_cache() / f"models--{repo.replace('/', '--')}"


def hub_model(name: HubName, offline: bool, progress: ProgressBar | None = None) -> Path:
    """A file or folder in the standard cache; the network only when something is missing.

    progress: instead of the client's own. Raises ModelNotFound or CacheError.
    """
    found = _cached(name)
    lacking = missing(found) if found else []
    if found and not lacking and _finished(name, found):
        return found
    if offline or os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false", "no"):
        reason = "offline"
    else:
        try:
            return _fetch(name, progress)
        except _Unreachable as e:
            reason = str(e)
            found = _cached(name)
            lacking = missing(found) if found else []
    if found and not lacking:
        return found  # perhaps without a side file, which whoever needs it will name
    if found:
        raise ModelNotFound(
            f"{name} is here in part, {_count(lacking)} missing ({lacking[0]}), "
            f"and the rest cannot be fetched ({reason})",
            f"octavo pull {name}",
        )
    raise ModelNotFound(
        f"cannot fetch {name} from the model hub ({reason}), and it is not in the cache",
        "octavo models",
    )


class _Unreachable(Exception):
    """The hub cannot be reached; the message says why."""


def _cached(name: HubName) -> Path | None:
    """The model's files in the cache, complete or not."""
    snapshot = _snapshot(name)
    return _select(snapshot, name.selection) if snapshot.is_dir() else None


def _snapshot(name: HubName) -> Path:
    """The folder of a revision's files, which may not exist."""
    folder = repository_folder(name.repo)
    try:
        commit = (folder / "refs" / name.revision).read_text().strip()
    except OSError:
        commit = name.revision
    return folder / "snapshots" / commit


def _select(folder: Path, selection: str) -> Path | None:
    if not selection and is_model_folder(folder):
        return folder
    chosen = choose((str(p.relative_to(folder)) for p in folder.rglob("*.gguf")), selection)
    return folder / chosen if chosen else None


def _finished(name: HubName, found: Path) -> bool:
    """True unless files beside the weights may be missing."""
    mark = download_mark(name.repo)
    state = mark.read_text() if mark.exists() else ""
    if found.is_file():
        return state != BEGUN
    since = mark.stat().st_mtime if state == FINISHED else 0.0
    blobs = repository_folder(name.repo) / "blobs"
    if any(blob.stat().st_mtime > since for blob in blobs.glob("*.incomplete")):
        return False
    return state == FINISHED or (not state and any((found / f).exists() for f in _TOKENIZERS))


def download_mark(repo: str) -> Path:
    """A file that says whether our download of the repository has begun or is finished."""
    return cache_folder().parent / "downloads" / repo.replace("/", "--")


def _fetch(name: HubName, progress: ProgressBar | None) -> Path:
    """Downloads what is not there yet. Raises _Unreachable, ModelNotFound or CacheError."""
    from huggingface_hub import snapshot_download

    mark = download_mark(name.repo)
    try:
        wanted, need = _wanted(name)
        with writing(mark.parent):
            mark.write_text(BEGUN)
        with _quiet(), _reporting(progress, need) as bars:
            folder = Path(
                snapshot_download(
                    name.repo, revision=name.revision, allow_patterns=wanted, tqdm_class=bars
                )
            )
        lacking = [file for file in wanted if not (folder / file).exists()]
        if lacking:
            raise _Unreachable(f"{_count(lacking)} did not arrive")
        mark.write_text(FINISHED)
    except OctavoError:
        raise
    except Exception as e:  # the client raises its HTTP library's errors too
        raise _explain(name, e) from None
    found = _select(folder, name.selection)
    assert found is not None  # _wanted has chosen it
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """The hub's client, without its log, and without progress bars if there is no terminal."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled as disabled
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    log = logging.getLogger("huggingface_hub")
    level, bars = log.level, not disabled() and not sys.stderr.isatty()
    log.setLevel(logging.CRITICAL)
    if bars:
        disable_progress_bars()
    try:
        yield
    finally:
        log.setLevel(level)
        if bars:
            enable_progress_bars()


@contextmanager
def _reporting(progress: ProgressBar | None, need: int) -> Iterator[type[Any] | None]:
    """What the hub's client makes its progress bars of, None for what it has itself."""
    if progress is None:
        yield None
        return
    from huggingface_hub.utils.tqdm import tqdm

    with progress("Fetching", need) as advance:

        class Reporting(tqdm):
            def __init__(self, *given: Any, **named: Any) -> None:
                on_disk = not str(named.get("name", "")).endswith(".transfer")
                self._told = on_disk and named.get("unit") == "B"
                super().__init__(*given, **named | {"disable": True})  # type: ignore[no-untyped-call]

            def update(self, n: float | None = 1) -> bool | None:
                if self._told and n:
                    advance(int(n))
                return None

        yield Reporting


def _wanted(name: HubName) -> tuple[list[str], int]:
    """Files of the repository that the model needs, and the bytes that are not here yet.

    Raises CacheError if they do not fit.
    """
    from huggingface_hub import HfApi

    info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
    sizes = {f.rfilename: f.size or 0 for f in info.siblings or ()}
    weights = [f for f in sizes if f.endswith(".safetensors") and "/" not in f]
    if weights and not name.selection:
        whole = [f for f in weights if not f.startswith("consolidated")] or weights
        modules = [f for f in sizes if re.match(r"\d+_\w+/[^/]+$", f)]
        files = [f for f in sizes if "/" not in f and f.endswith(_SIDE_FILES)]
        files = [*whole, *modules, *files]
    elif chosen := choose(sizes, name.selection):
        files = parts(chosen)
        if lacking := [f for f in files if f not in sizes]:
            raise ModelNotFound(f"{name.repo} lacks {lacking[0]}, a part of {chosen}")
        beside = [f for f in sizes if Path(f).parent == Path(chosen).parent]
        files += mmproj_files(beside, Path(chosen).name)[:1]
    else:
        there = ", ".join(f for f in sizes if f.endswith((".gguf", ".safetensors", ".bin")))
        wanted = name.selection or ".gguf or .safetensors"
        raise ModelNotFound(f"{name.repo} has no {wanted} file; it has {there or 'no weights'}")
    snapshot = _snapshot(name)
    need = sum(sizes[f] for f in files if not (snapshot / f).exists())
    need_space(hub_cache(), need, f"fetching {name}", "HF_HOME")
    return files, need


def _explain(name: HubName, e: Exception) -> Exception:
    from huggingface_hub import errors

    if isinstance(e, _Unreachable):
        return e
    page = f"https://huggingface.co/{name.repo}"
    if isinstance(e, errors.GatedRepoError):
        return ModelNotFound(
            f"{name.repo} is gated: accept its terms on {page}, then set HF_TOKEN",
            "HF_TOKEN=hf_...",
        )
    if isinstance(e, errors.RepositoryNotFoundError):
        return ModelNotFound(
            f"the model hub has no {name.repo}, or it is private and HF_TOKEN does not open it"
        )
    if isinstance(e, errors.RevisionNotFoundError):
        return ModelNotFound(f"{name.repo} has no revision {name.revision}")
    if isinstance(e, OSError) and e.errno in _DISK:
        return unwritable(hub_cache(), e, "HF_HOME")
    return _Unreachable(type(e).__name__)


def _count(files: list[Any]) -> str:
    return f"{len(files)} file{'s' * (len(files) > 1)}"
