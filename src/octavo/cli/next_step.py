"""What to try with a model that was just made."""

from __future__ import annotations

from pathlib import Path

from octavo.cli.screen import say

ANSWERS = {"embed": "makes vectors, at /v1/embeddings", "rank": "ranks texts, at /v1/rerank"}


def say_next(model: Path) -> None:
    """Says the command that shows what a model does, nothing for one that Octavo cannot run."""
    from octavo.checkpoint import open_checkpoint
    from octavo.errors import OctavoError
    from octavo.models import build_program

    try:
        task = build_program(open_checkpoint(model)).task
    except OctavoError:
        return
    if task == "generate":
        return say(f"try: octavo chat {model}")
    say(f"it generates no text: it {ANSWERS[task]}")
    say(f"try: octavo serve {model}")
