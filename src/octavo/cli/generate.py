"""octavo generate."""

from __future__ import annotations

import sys

import click

from octavo.cli.options import progress_bar, sizing


@click.command()
@click.argument("model")
@click.option("-p", "--prompt", help="The text to continue. [standard input]")
@click.option("--max-tokens", type=int, default=128, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--seed", type=int)
@sizing
def generate(
    model: str, prompt: str | None, max_tokens: int, temperature: float, seed: int | None,
    memory: str | None, context: int | None, threads: int | None, kv_dtype: str, offline: bool,
) -> None:  # fmt: skip
    """Continue a prompt with MODEL, without its chat template."""
    from octavo.engine.request import SamplingParams
    from octavo.llm import LLM

    text = sys.stdin.read() if prompt is None else prompt
    llm = LLM(
        model, memory=memory, context=context, threads=threads, kv_dtype=kv_dtype,
        offline=offline, loading=progress_bar,
    )  # fmt: skip
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    for piece in llm.stream(llm.tokenizer.encode(text), params):
        click.echo(piece, nl=False)
        sys.stdout.flush()
    click.echo()
