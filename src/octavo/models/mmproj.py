"""GGUF models that take images: a second file, called mmproj, has the encoder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from octavo.checkpoint import Checkpoint, open_checkpoint
from octavo.checkpoint.folders import mmproj_files
from octavo.errors import CheckpointError, OctavoError, UsageError
from octavo.models.metadata import Metadata
from octavo.models.mmproj_folder import encoder_of
from octavo.models.mmproj_qwen import KINDS
from octavo.models.mmproj_tensors import projector_of

AUTO, NONE = "auto", "none"
ARCHITECTURE = "clip"
# The one architecture that a projector is made for
_LANGUAGE = {"idefics3": "llama", "gemma3": "gemma3"} | {n: k.language for n, k in KINDS.items()}


def with_mmproj(checkpoint: Checkpoint, mmproj: str = AUTO) -> Checkpoint:
    """A GGUF model together with its image encoder's file.

    mmproj: the file; "auto": one that lies beside the model and fits it, if there is one; "none".
    Raises UsageError for a folder that is given one, CheckpointError or Unsupported for a file that
    is no encoder of this model.
    """
    if mmproj == NONE or (mmproj == AUTO and checkpoint.format != "gguf"):
        return checkpoint
    if checkpoint.format != "gguf":
        raise UsageError(
            f"--mmproj is for .gguf models; {checkpoint.path.name} is a folder, which has its own "
            "image encoder"
        )
    if mmproj != AUTO:
        return _joined(checkpoint, Path(mmproj))
    path = checkpoint.path
    names = [p.name for p in path.parent.glob("*.gguf")]
    for name in mmproj_files(names, path.name):
        try:
            joined = _joined(checkpoint, path.with_name(name))
            encoder_of(joined)
        except OctavoError:  # another model's, or of a kind that is not known
            continue
        return joined
    return checkpoint


def _joined(model: Checkpoint, path: Path) -> Checkpoint:
    other = open_checkpoint(path)
    if other.format != "gguf" or other.architecture != ARCHITECTURE:
        raise CheckpointError(
            f"{path.name} is no mmproj file: its architecture is {other.architecture[:40]!r}, not "
            f"{ARCHITECTURE!r}",
            "name the model first, and the file of its image encoder with --mmproj",
        )
    joined = replace(
        model, mmproj=other, sources=(*model.sources, *other.sources),
        maps=(*model.maps, *other.maps), states={**model.states, **other.states},
    )  # fmt: skip
    width, wanted = _width(joined), Metadata(model).get("embedding_length")
    if width != wanted:
        raise CheckpointError(
            f"{path.name} makes embeddings of {width} features; {model.path.name} takes {wanted}",
            "take the mmproj file of the same model",
        )
    return joined


def _width(model: Checkpoint) -> int:
    """Features of the embeddings."""
    m = model.mmproj
    assert m is not None
    kind, architecture = projector_of(m), model.architecture
    if _LANGUAGE.get(kind, architecture) != architecture:
        raise CheckpointError(
            f"{m.path.name} is made for {_LANGUAGE[kind]} models; {model.path.name} is "
            f"{architecture[:40]}"
        )
    if kind == "gemma3":
        return m.tensor("mm.input_projection.weight").shape[-1]
    return m.tensor("mm.model.fc.weight" if kind == "idefics3" else "mm.2.weight").shape[0]
