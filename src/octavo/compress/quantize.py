"""`octavo.quantize`: a model made small in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from shlex import quote

from octavo.checkpoint import Checkpoint, open_checkpoint
from octavo.checkpoint.base import TensorType
from octavo.checkpoint.hub import locate
from octavo.checkpoint.progress import Advance
from octavo.compress.data import SELF, split
from octavo.compress.folder_job import FolderJob
from octavo.compress.folder_view import as_folder
from octavo.compress.gguf_job import GgufJob
from octavo.compress.gguf_of_folder import GgufOfFolderJob
from octavo.compress.jobs import Job, Rounded, check_replaced, folder_name
from octavo.compress.recipe_file import find_recipe
from octavo.compress.recipes import LAYOUTS, GgufRecipe, Recipe
from octavo.errors import UsageError
from octavo.models import build_program

FORMATS = ("gguf", *LAYOUTS)


def job_of(
    checkpoint: Checkpoint, recipe: Recipe, output: Path, format: str | None = None,
    data: Path | None = None,
) -> Job:  # fmt: skip
    """The job of a recipe on a model. A GGUF file that is to become a folder is dequantised first.

    format: how the result is stored, by default the first that the recipe names. data: what
    calibrated methods look at, by default Python's manual; given to a recipe of GGUF files, scales
    are chosen by the importance of columns. Raises UsageError for what does not fit together.
    """
    if format not in (None, *FORMATS):
        raise UsageError(f"no format {format!r}; there are {', '.join(FORMATS)}")
    if isinstance(recipe, GgufRecipe):
        if format not in (None, "gguf"):
            raise UsageError(f"{recipe.name} is not stored as {format}: it is a GGUF file")
        seen = _texts(data, checkpoint) if data is not None else None
        return GgufJob(checkpoint, recipe, output, seen)
    if data is not None and not recipe.calibrated:
        raise UsageError(f"{recipe.name} looks at no data", "--recipe gptq-4")
    texts = _texts(data, checkpoint) if recipe.calibrated else tuple
    folder = as_folder(checkpoint, TensorType.BF16)
    if format == "gguf":
        return GgufOfFolderJob.of(folder, recipe, output, texts)
    layout = next(v for v in LAYOUTS if v == (format or recipe.layouts[0]))
    return FolderJob(folder, recipe, output, layout, texts)


def _texts(data: Path | None, checkpoint: Checkpoint) -> Callable[[], Iterable[str]]:
    """Text of one's own is read at once; a model writes its own only when it is asked for."""
    if data == SELF:
        if build_program(checkpoint).task != "generate":
            raise UsageError(f"{checkpoint.path.name} generates no text to look at", "--data FILE")
        return lambda: split("calibration", data, checkpoint.path)
    found = split("calibration", data)
    return lambda: found


def suggestion(checkpoint: Checkpoint, output: Path, format: str | None = None) -> str:
    """Options with which a model can be made small, and an output of that kind."""
    if checkpoint.format == "gguf" and format in (None, "gguf"):
        file = output if output.suffix == ".gguf" else f"{output}.gguf"
        return f"--recipe q4_k_m --output {quote(str(file))}"
    layout = next((v for v in LAYOUTS if v == format), LAYOUTS[0])
    return f"--recipe rtn-4 --format {layout} --output {quote(str(folder_name(output)))}"


def quantize(
    model: str | Path, *, recipe: str, output: str | Path, data: str | Path | None = None,
    format: str | None = None, offline: bool = False, progress: Advance = lambda _: None,
) -> Rounded:  # fmt: skip
    """Makes a model small and writes it as a new one; the same as `octavo quantize`.

    model: a file, folder or name. recipe: a built-in one (`octavo quantize --list`) or a file of
    one's own. data: text for methods that look at what layers see. progress: told the bytes of
    each piece once it is done. A run that was cut off goes on when it is called again. Raises
    OctavoError.
    """
    output = Path(output)
    if output.is_file():
        raise UsageError(f"{output} is there already")
    checkpoint = open_checkpoint(locate(str(model), offline=offline).path)
    given = None if data is None else Path(data)
    job = job_of(checkpoint, find_recipe(recipe), output, format, given)
    check_replaced(job)
    return job.run(progress)
