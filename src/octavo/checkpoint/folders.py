"""Which files of a folder are the model: a Hugging Face folder, or one GGUF of several."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

QUANT_ORDER = ("Q4_K_M", "Q4_1", "Q4_0", "Q5_K_M", "Q8_0", "BF16", "F16")
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.(gguf|safetensors)$")
_NO_MODEL = re.compile(r"(^|[-_.])(mmproj|imatrix)([-_.]|$)", re.IGNORECASE)
_MMPROJ = re.compile(r"(^|[-_.])mmproj([-_.].*)?\.gguf$", re.IGNORECASE)


def is_model_folder(folder: Path) -> bool:
    """True if the folder holds a Hugging Face model: a configuration and weights. One that nobody
    may look into holds none."""
    try:
        return (folder / "config.json").exists() and any(folder.glob("*.safetensors"))
    except OSError:
        return False


def gguf_models(files: Iterable[str]) -> list[str]:
    """GGUF models of a folder: the first shard of each, without multimodal projectors."""
    models = []
    for file in sorted(f for f in files if f.endswith(".gguf")):
        shard = _SHARD.search(file)
        if _NO_MODEL.search(Path(file).name) or (shard and shard[1] != "00001"):
            continue
        models.append(file)
    return models


def mmproj_files(files: Iterable[str], model: str) -> list[str]:
    """Files that may hold the image encoder of a GGUF model, the likeliest first: those named after
    it, then those of 16 bits."""
    stem = Path(model).stem.lower()

    def unlikely(file: str) -> tuple[bool, bool, str]:
        name = Path(file).name.lower()
        return stem not in name, "f16" not in name, name

    return sorted((f for f in files if _MMPROJ.search(Path(f).name)), key=unlikely)


def choose(files: Iterable[str], selection: str) -> str | None:
    """The GGUF file of a quantization, given a word of its name or the whole name."""
    models = gguf_models(files)
    for wanted in (selection,) if selection else QUANT_ORDER:
        if wanted in models:
            return wanted
        for ending in ("(?![a-z0-9_])", ""):  # Q4_K means Q4_K_M where there is no Q4_K
            word = re.compile(f"(?<![a-z0-9]){re.escape(wanted.lower())}{ending}")
            for file in models:
                if word.search(Path(file).name.lower()):
                    return file
    return models[0] if models and not selection else None


def parts(file: str) -> list[str]:
    """All shards of a model, given the first. A model in one file is its only shard."""
    shard = _SHARD.search(file)
    if shard is None:
        return [file]
    stem, count, kind = file[: shard.start()], int(shard[2]), shard[3]
    return [f"{stem}-{i + 1:05d}-of-{shard[2]}.{kind}" for i in range(min(count, 10_000))]


def missing(path: Path) -> list[str]:
    """Names of files that a model refers to but that are missing."""
    if not path.is_dir():
        return [name for name in parts(path.name) if not (path.parent / name).exists()]
    wanted: set[str] = set()
    for index in path.glob("*.safetensors.index.json"):
        if index.with_name(index.name.removesuffix(".index.json")).exists():
            continue  # a whole file comes before an index
        try:
            wanted.update(map(str, json.loads(index.read_bytes())["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # whoever opens the model will say what is wrong with it
    whole = (path / "model.safetensors").exists()
    for file in path.glob("*.safetensors"):
        if not (whole and file.name.startswith("model-")):
            wanted.update(parts(file.name))
    return sorted(name for name in wanted if not (path / name).exists())
