"""What the terminal shows of a server: the ready block, and the sum at its end."""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from octavo import __version__
from octavo.cli.screen import say

if TYPE_CHECKING:
    from octavo.engine.plan import Plan
    from octavo.generate.model import ServedModel
    from octavo.server.exchange import Exchange
    from octavo.server.registry import Entry, Registry

LISTED = 12  # models in the ready block


class Screen:
    """titles: of models, by name; plans: of those that are planned before they are loaded. budget:
    bytes for all models. replicas: engines of each. page: whether there is one, which `opens`
    opens."""

    def __init__(
        self, url: str, budget: int, plans: dict[str, Plan], titles: dict[str, str],
        replicas: int, page: bool, opens: bool,
    ) -> None:  # fmt: skip
        self._url, self._budget, self._plans, self._titles = url, budget, plans, titles
        self._replicas, self._page, self._opens = replicas, page, opens
        self._began = time.monotonic()
        self.requests = self.tokens = self.errors = 0

    def ready(self, models: Registry) -> None:
        entries = list(models)
        seconds = time.monotonic() - self._began
        lines = ["", f"Octavo {__version__}   ready in {seconds:.1f} s"]
        if len(entries) == 1 and entries[0].model is not None:
            lines += self._one(entries[0].model)
        else:
            lines += self._several(entries)
        lines += [f"  page      {self._url}/"] if self._page else []
        lines += [f"  API       {self._url}/v1", f"  metrics   {self._url}/metrics", ""]
        example = next((e.model for e in entries if e.model is not None), None)
        if example is not None:
            lines += self._example(example)
        say("\n".join(lines))
        if self._opens:
            # Waits, for some browsers until they are closed.
            threading.Thread(target=click.launch, args=(self._url, True), daemon=True).start()

    def _one(self, served: ServedModel) -> list[str]:
        from octavo.engine.plan import size

        plan = self._plans[served.name]
        parts = [
            f"{size(plan.weights)} weights", f"{size(plan.buffers)} buffers",
            f"{size(plan.cache)} KV cache", f"{size(plan.process)} process",
        ]  # fmt: skip
        if plan.adapters:
            parts.insert(3, f"{size(plan.adapters)} adapters")
        each = f" for each of {self._replicas} replicas" if self._replicas > 1 else ""
        return [
            f"  model     {served.name}",
            f"            {self._titles[served.name]}",
            f"  kernels   {getattr(served.client, 'isa', '')}, {plan.threads} "
            f"thread{'s' * (plan.threads > 1)}{each}, activations {plan.activations}",
            f"  memory    {size(plan.total)} at most{each}, of {size(plan.available)} available",
            f"            = {' + '.join(parts[:2])}",
            f"            + {' + '.join(parts[2:])}",
            f"  capacity  {plan.tokens:,} tokens = {plan.tokens / plan.context:.1f} requests",
            f"            at the full {plan.context:,} context{each}",
        ]

    def _several(self, entries: Sequence[Entry]) -> list[str]:
        from octavo.engine.plan import size

        lines: list[str] = []
        for entry in entries[:LISTED]:
            plan = self._plans.get(entry.name)
            each = f"{self._replicas} × " if self._replicas > 1 else ""
            sizes = f"   {each}{size(plan.total)}, {plan.context:,} context" if plan else ""
            lines.append(f"  {'' if lines else 'models':8}  {entry.name}   {entry.state}{sizes}")
        if more := entries[LISTED:]:
            lines.append(f"            and {len(more)} more: {self._url}/v1/models")
        return [*lines, f"  memory    {size(self._budget)} at most, for the engines of all models"]

    def _example(self, served: ServedModel) -> list[str]:
        """A request to paste."""
        route, *fields = {
            "generate": (
                "chat/completions",
                '"messages":[{"role":"user",',
                '  "content":"What is the capital of France?"}]',
            ),
            "embed": ("embeddings", '"input":"What is the capital of France?"'),
            "rank": ("rerank", '"query":"capital of France",', '"documents":["Paris","Rome"]'),
        }[served.task]
        if served.task == "generate" and served.template is None:
            route, fields = "completions", ['"prompt":"The capital of France is"']
        body = "\n    ".join([f'{{"model":{json.dumps(served.name)},', *fields]) + "}"
        return [f"  curl {self._url}/v1/{route} \\", f"    -d {shlex.quote(body)}"]

    def count(self, one: Exchange) -> None:
        if one.usage is not None:
            self.requests += 1
            self.tokens += one.usage.completion
            self.errors += one.status >= 500

    def goodbye(self) -> None:
        say(f"served {self.requests} requests, {self.tokens:,} tokens, {self.errors} errors; bye")
