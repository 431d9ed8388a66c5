"""octavo generate."""

from __future__ import annotations

import sys
from typing import Any

import click

from octavo.cli.options import draft_option, model_argument, sampled, sampling, sizing
from octavo.cli.screen import progress_bar, say


@click.command()
@model_argument()
@click.option("-p", "--prompt", help="The text to continue. [standard input]")
@sampling
@draft_option
@sizing
def generate(
    model: str, prompt: str | None, memory: str | None, context: int | None,
    threads: int | None, kv_dtype: str, activations: str, mmproj: str,
    vision_dtype: str, device: str, offline: bool, draft: str | None, **given: Any,
) -> None:  # fmt: skip
    """Continue a prompt with MODEL, without its chat template.

    At temperature 0 and for 128 tokens, unless told otherwise.
    """
    from octavo.engine.request import SamplingParams
    from octavo.llm import LLM

    text = sys.stdin.read() if prompt is None else prompt
    llm = LLM(
        model, memory=memory, context=context, threads=threads, kv_dtype=kv_dtype,
        activations=activations, mmproj=mmproj, vision_dtype=vision_dtype, device=device,
        offline=offline, draft=draft, loading=progress_bar,
    )  # fmt: skip
    params = sampled(SamplingParams(max_tokens=128, temperature=0), given)
    for piece in llm.stream(llm.tokenizer.encode(text), params):
        say(piece, end="")
    say()
