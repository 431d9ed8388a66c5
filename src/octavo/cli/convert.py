"""octavo convert."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.next_step import say_next
from octavo.cli.options import json_flag, model_argument, offline_option
from octavo.cli.screen import progress_bar, say, say_json, size

if TYPE_CHECKING:
    from octavo.compress.conversion import Converted

FORMATS = ("gguf", "safetensors", "gptq", "awq", "compressed-tensors", "mlx")
WORST = 3  # tensors that are named


@click.command()
@model_argument()
@click.option(
    "--output", required=True, type=click.Path(path_type=Path), metavar="PATH",
    help="A new .gguf file, or a folder.",
)  # fmt: skip
@click.option(
    "--format", "format", type=click.Choice(FORMATS),
    help="What to make. [gguf if the output ends so, else safetensors]",
)  # fmt: skip
@click.option(
    "--report", type=click.Path(path_type=Path), metavar="FILE",
    help="Write what has become of each tensor, as JSON.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace the files that --output names.")
@offline_option
@json_flag
def convert(
    model: str, output: Path, format: str | None, report: Path | None, force: bool, offline: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Write MODEL in another format: GGUF, or a Hugging Face folder.

    Quantized weights keep their values where the new format's grid holds them; the others become
    16 bits, and what that loses is measured.
    """
    from octavo.checkpoint import open_checkpoint
    from octavo.checkpoint.hub import locate
    from octavo.checkpoint.places import check_report
    from octavo.checkpoint.writer import write_json
    from octavo.compress.conversion import Conversion, Format
    from octavo.errors import UsageError

    wanted: Format = format or ("gguf" if output.suffix == ".gguf" else "safetensors")  # type: ignore[assignment]
    checkpoint = open_checkpoint(locate(model, offline=offline).path)
    if output.is_file() and not force:
        raise UsageError(f"{output} is there already", "--force")
    check_report(report)
    conversion = Conversion(checkpoint, output, wanted)
    if conversion.mmproj is not None and conversion.mmproj.is_file() and not force:
        raise UsageError(f"{conversion.mmproj} is there already", "--force")
    with progress_bar(f"Converting to {wanted}", checkpoint.nbytes) as advance:
        result = conversion.run(advance)
    if report is not None:
        write_json(report, _json(result))
    if as_json:
        return say_json(_json(result))
    _show(result)


def _json(r: Converted) -> dict[str, Any]:
    return {
        "source": str(r.source), "output": str(r.output), "format": r.format,
        "mmproj": r.mmproj and str(r.mmproj),
        "bytes_before": r.bytes_before, "bytes_after": r.bytes_after, "lossless": r.lossless,
        "tensors": [
            {"name": t.name, "was": t.was, "now": t.now, "lossless": t.lossless, "error": t.error}
            for t in r.tensors
        ],
    }  # fmt: skip


def _show(r: Converted) -> None:
    kinds = Counter((t.was, t.now, t.lossless) for t in r.tensors)
    for (was, now, lossless), count in kinds.most_common():
        errors = [t.error for t in r.tensors if (t.was, t.now) == (was, now) and not t.lossless]
        what = "lossless" if lossless else f"relative error up to {max(errors):.1e}"
        say(f"  {count} tensors {was} -> {now}: {what}")
    changed = sorted((t for t in r.tensors if not t.lossless), key=lambda t: -t.error)
    for t in changed[:WORST]:
        say(f"  {t.name} loses {t.error:.1e}")
    if len(changed) > WORST:
        say(f"  {len(changed) - WORST} more lose less; --report FILE has them all")
    exact = "every value is the same" if r.lossless else f"{len(changed)} tensors have changed"
    say(f"{r.output} takes {size(r.bytes_after)} ({size(r.bytes_before)} before); {exact}")
    if r.mmproj is not None:
        say(f"the image encoder is {r.mmproj}")
    say_next(r.output)
