"""How a model's states become one vector or score, as sentence-transformers and GGUF files say."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.base import Checkpoint
from octavo.checkpoint.dense import Dense, read_dense
from octavo.checkpoint.files import read_json, read_json_list
from octavo.errors import CheckpointError, RequestError, Unsupported

Vector = npt.NDArray[np.float32]
Mode = Literal["mean", "cls", "last"]
_GGUF: dict[int, Mode] = {1: "mean", 2: "cls", 3: "last"}
_MODES: dict[str, Mode] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
_OLDER = {
    "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean", "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean", "pooling_mode_lasttoken": "lasttoken",
}  # fmt: skip
_READ = ("Transformer", "Pooling", "Dense", "Normalize", "Dropout")
# torch's names for what is done to the score of a cross-encoder
_ACTIVATIONS = {"Sigmoid": True, "Identity": False}


@dataclass(frozen=True)
class Pooling:
    """The state to take, and what becomes of it.

    steps: layers that follow, None where the vector is brought to length 1. normalize: that is done
    last. prompt: text before every input; lower: inputs are lower-cased. probability: a
    cross-encoder's score goes through the logistic function.
    """

    mode: Mode
    normalize: bool
    steps: tuple[Dense | None, ...] = ()
    prompt: str = ""
    lower: bool = False
    probability: bool = True

    def prepare(self, text: str) -> str:
        """The text with the model's prompt, lower-cased if the model wants it."""
        text = self.prompt + text
        return text.lower() if self.lower else text

    def finish(self, vector: Vector, dimensions: int | None = None) -> Vector:
        """A pooled vector as the model's users expect it, or its first `dimensions`.

        Raises RequestError for more dimensions than there are.
        """
        for step in self.steps:
            vector = unit(vector) if step is None else step(vector)
        if dimensions is not None:
            if not 1 <= dimensions <= len(vector):
                raise RequestError(
                    f"dimensions is {str(dimensions)[:20]}; 1 to {len(vector)}", "dimensions",
                    "invalid_value",
                )  # fmt: skip
            vector = vector[:dimensions]
        return unit(vector) if self.normalize else vector

    def score(self, logit: float) -> float:
        """A cross-encoder's score: a probability, or the logit where the model says so."""
        if not self.probability:
            return logit
        e = math.exp(-abs(logit))
        return 1 / (1 + e) if logit >= 0 else e / (1 + e)


def unit(vector: Vector) -> Vector:
    """The vector normalized to length 1. A zero vector stays zero."""
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return (vector / np.float32(length)).astype(np.float32) if length else vector


def read_pooling(checkpoint: Checkpoint, encoder: bool) -> Pooling:
    """What the checkpoint says, else the mean (encoders) or the last state, of length 1.

    Raises CheckpointError, or Unsupported for a kind of pooling that is not built.
    """
    default: Mode = "mean" if encoder else "last"
    if checkpoint.format == "gguf":
        return _from_gguf(checkpoint, default)
    folder, name = checkpoint.path, checkpoint.path.name
    modules = _modules(folder)
    pooling = next((path for kind, path in modules if kind == "Pooling"), None)
    if pooling is None and (folder / "1_Pooling" / "config.json").exists():
        pooling = folder / "1_Pooling"
    options = {} if pooling is None else read_json(pooling / "config.json")
    steps: list[Dense | None] = []
    for kind, path in modules:
        if kind == "Dense":
            steps.append(read_dense(path, name))
        elif kind == "Normalize":
            steps.append(None)
    if len(modules) < 2:  # no word of how the vector is finished
        steps.append(None)
    _check_widths(steps, checkpoint)
    normalize = bool(steps) and steps[-1] is None
    prompt, lower = _preparation(checkpoint)
    if prompt and options.get("include_prompt") is False:
        raise Unsupported(f"{name}: pooling without the prompt that every text begins with")
    return Pooling(
        default if pooling is None else _mode(options, name), normalize,
        tuple(steps[:-1] if normalize else steps), prompt, lower, _probability(checkpoint),
    )  # fmt: skip


def _check_widths(steps: list[Dense | None], checkpoint: Checkpoint) -> None:
    """Raises CheckpointError for layers whose inputs do not match the outputs before them."""
    width = checkpoint.metadata.get("hidden_size")
    for step in steps:
        if step is None:
            continue
        outputs, inputs = step.shape
        if isinstance(width, int) and inputs != width:
            raise CheckpointError(
                f"{checkpoint.path.name}: a Dense module of {inputs} features after {width}"
            )
        width = outputs


def _from_gguf(checkpoint: Checkpoint, default: Mode) -> Pooling:
    stored = checkpoint.metadata.get(f"{checkpoint.architecture}.pooling_type", 0)
    if stored == 0:
        return Pooling(default, True)
    if not isinstance(stored, int) or stored not in _GGUF:
        raise Unsupported(
            f"{checkpoint.path.name}: pooling_type {str(stored)[:20]}; 0 to 3 are read"
        )
    return Pooling(_GGUF[stored], True)


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """Kind and folder of each module of a sentence-transformers model, in their order."""
    path = folder / "modules.json"
    if not path.exists():
        return []
    out = []
    for entry in read_json_list(path):
        given = entry if isinstance(entry, dict) else {}
        kind, where = given.get("type"), given.get("path")
        if not isinstance(kind, str) or not isinstance(where, str):
            raise CheckpointError(f"modules.json: {str(entry)[:60]!r} has no type and path")
        kind = kind.rpartition(".")[2]
        if kind not in _READ:
            raise Unsupported(
                f"{folder.name}: module {kind[:40]!r}   (modules.json)",
                f"built: {', '.join(_READ)}",
            )
        if where not in ("", ".") and Path(where).name != where:
            raise CheckpointError(f"modules.json: {where[:60]!r} is not a folder of the model")
        out.append((kind, folder / where))
    kinds = [kind for kind, _ in out]
    built = kinds[:2] == ["Transformer", "Pooling"] and not {*kinds[2:]} & {*kinds[:2]}
    if not built and kinds != ["Transformer"]:
        raise Unsupported(
            f"{folder.name}: modules {', '.join(kinds)[:80] or 'none'}   (modules.json)",
            "built: a Transformer and a Pooling, then Dense and Normalize",
        )
    return out


def _mode(options: dict[str, Any], name: str) -> Mode:
    wanted = options.get("pooling_mode")
    if wanted is None:
        wanted = [mode for key, mode in _OLDER.items() if options.get(key) is True]
    modes = [str(mode) for mode in (wanted if isinstance(wanted, list) else [wanted])]
    if len(modes) != 1 or modes[0] not in _MODES:
        text = ", ".join(modes)[:80] or "nothing"
        raise Unsupported(f"{name}: pooling by {text}", f"built: {', '.join(_MODES)}")
    return _MODES[modes[0]]


def _preparation(checkpoint: Checkpoint) -> tuple[str, bool]:
    """The prompt that a folder puts before every text, and whether texts are lower-cased."""
    path = checkpoint.files.get("config_sentence_transformers.json")
    config = read_json(path) if path else {}
    default, prompts, prompt = config.get("default_prompt_name"), config.get("prompts"), ""
    if default is not None:
        found = prompts.get(str(default)) if isinstance(prompts, dict) else None
        prompt = found if isinstance(found, str) else ""
        if not isinstance(found, str):
            raise CheckpointError(
                f"{checkpoint.path.name}: default_prompt_name {str(default)[:40]!r} is no prompt"
            )
    path = checkpoint.files.get("sentence_bert_config.json")
    return prompt, bool(path and read_json(path).get("do_lower_case"))


def _probability(checkpoint: Checkpoint) -> bool:
    """True if a cross-encoder's score is a probability. Raises Unsupported."""
    stored = checkpoint.metadata.get("sentence_transformers")
    wanted = stored.get("activation_fn") if isinstance(stored, dict) else None
    wanted = wanted or checkpoint.metadata.get("sbert_ce_default_activation_function")
    if wanted is None:
        return True
    kind = str(wanted).rpartition(".")[2]
    if kind not in _ACTIVATIONS:
        raise Unsupported(
            f"{checkpoint.path.name}: scores through {kind[:40]!r}",
            f"built: {', '.join(_ACTIVATIONS)}",
        )
    return _ACTIVATIONS[kind]
