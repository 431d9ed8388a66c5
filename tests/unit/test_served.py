"""What is served beside the models that are named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.checkpoint.hub import Located, no_progress
from octavo.cli import served
from octavo.cli.served import ServedChoice
from octavo.server.source import ModelOptions


@pytest.mark.parametrize(("mmproj", "kept"), [("a/mmproj.gguf", "auto"), ("none", "none")])
def test_options_about_one_model_do_not_hold_for_those_fetched_later(
    mmproj: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[dict[str, Any]] = []
    located = Located(Path("b"), "b")
    monkeypatch.setattr(served, "locate_published", lambda name, **_: located)
    monkeypatch.setattr(served, "open_checkpoint", lambda path: None)
    monkeypatch.setattr(served, "make_plan", lambda compiled, **given: planned.append(given))
    like = ModelOptions(
        Located(Path(), ""), "a", chat_template="{{ a }}", adapters=(("x", Path("x")),), lora=True,
        mmproj=mmproj,
    )  # fmt: skip
    sizing = {"context": None, "draft": object(), "speculation": "draft"}
    choice = ServedChoice(like, sizing, None)
    assert (found := choice.fetch("b", no_progress)) is not None
    options, source = found
    assert (options.name, options.chat_template, options.adapters) == ("b", None, ())
    assert options.mmproj == kept and options.lora
    opened: Any = SimpleNamespace(compiled=None, encoder=None)
    source._make_plan(opened)
    assert (planned[0]["draft"], planned[0]["speculation"]) == (None, "auto")
    assert choice.fetch("b", no_progress) is None
