"""The Python API: a model in this process.

llm = octavo.LLM("smollm2")
llm.generate(["Once upon a time"], octavo.SamplingParams(max_tokens=32))
"""

from __future__ import annotations

import itertools
import math
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from octavo.checkpoint.hub import Progress, locate, no_progress
from octavo.checkpoint.pooling import Vector, read_pooling, unit
from octavo.engine.constraint import TokenTable
from octavo.engine.loader import load_engine, open_model
from octavo.engine.plan import available_memory, make_plan, parse_size
from octavo.engine.request import Request, SamplingParams, TokenEvent
from octavo.errors import EngineFailed, RequestError, UsageError
from octavo.text import ChatTemplate, TextStream, Tokenizer, load_tokenizer
from octavo.text.chat import template_source

KV_DTYPES = ("auto", "bf16", "int8", "f32")


@dataclass(frozen=True)
class Completion:
    """A finished answer. logprobs: of `tokens`, when asked for; score: of a beam search's text."""

    text: str
    tokens: list[int]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    logprobs: list[float] | None = None
    score: float | None = None


class _Assembly:
    """Collects one request's events into a Completion."""

    def __init__(self, table: list[bytes], request: Request) -> None:
        self.request = request
        self.finish: str | None = None
        self._stream = TextStream(table, request.params.stop)
        self._text = ""
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._cached = 0
        self._score: float | None = None

    def push(self, event: TokenEvent) -> str:
        """Text that became showable."""
        self._cached = event.cached
        self._score = event.score if event.width else None
        if event.token is not None and event.finish != "stop":
            self._tokens.append(event.token)
            self._logprobs.append(event.logprob)
        text, self.finish = self._stream.push(event.token, event.finish)
        self._text += text
        return text

    def completion(self) -> Completion:
        wanted = self.request.params.logprobs is not None
        return Completion(
            text=self._text,
            tokens=self._tokens,
            finish_reason=self.finish or "abort",
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self._cached,
            logprobs=self._logprobs if wanted else None,
            score=self._score,
        )


def token_table(tokenizer: Tokenizer) -> TokenTable:
    """What an engine is told of a vocabulary."""
    special = tokenizer.special
    return TokenTable(tokenizer.grammar_bytes(), sorted(special.control), sorted(special.eos))


class LLM:
    """A loaded model (demo name, Hugging Face id, folder or .gguf).

    memory: a ceiling such as "8GiB" or "50%". context: most tokens of a sequence. kv_dtype:
    "bf16", "int8", "f32", or "auto", which is f32 for mixtures of experts and bf16 for others.
    adapters: LoRA adapters by name, {} for none yet; they take at most lora_memory. packed_cache:
    keep packed weights on disk for the next start. loading: opens a progress bar, given what it
    is for and how many bytes.
    Raises OctavoError when the model cannot be found, read or fitted.
    """

    def __init__(
        self,
        model: str,
        *,
        memory: str | None = None,
        context: int | None = None,
        threads: int | None = None,
        kv_dtype: str = "auto",
        offline: bool = False,
        chat_template: str | None = None,
        adapters: dict[str, str] | None = None,
        lora_memory: str = "256MiB",
        packed_cache: bool = False,
        loading: Progress = no_progress,
    ) -> None:
        if kv_dtype not in KV_DTYPES:
            raise UsageError(f"kv_dtype {kv_dtype!r}; it may be {' or '.join(KV_DTYPES)}")
        located = locate(model, offline=offline, progress=loading)
        self.name = located.name
        self.path: Path = located.path
        opened = open_model(located.path, adapters is not None)
        self.tokenizer = load_tokenizer(opened.checkpoint)
        source = chat_template or template_source(opened.checkpoint)
        self.template = ChatTemplate(source, self.tokenizer) if source else None
        self.plan = make_plan(
            opened.lowered, name=self.name, memory=memory, context=context, threads=threads,
            kv_dtype=kv_dtype, packed=packed_cache,
            adapters=parse_size(lora_memory, available_memory()) if adapters is not None else 0,
        )  # fmt: skip
        opened = open_model(located.path, adapters is not None, self.plan.context)
        with loading("Loading", opened.checkpoint.nbytes) as advance:
            self.engine = load_engine(opened, self.plan, token_table(self.tokenizer), advance)
        for adapter, folder in (adapters or {}).items():
            self.load_adapter(adapter, folder)
        if self.template is not None:
            self.template.check()
        self.task = opened.task
        self.pooling = read_pooling(opened.checkpoint, opened.task != "generate")
        self.defaults = SamplingParams(**located.sampling)  # type: ignore[arg-type]
        self._ids = itertools.count()

    def load_adapter(self, name: str, folder: str) -> None:
        """Makes a LoRA adapter (a PEFT folder) usable by name. Raises RequestError."""
        if self.engine.adapters is None:
            raise UsageError("give LLM(adapters={}) to load adapters")
        self.engine.adapters.load(name, Path(folder))

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter. Raises RequestError."""
        if self.engine.adapters is not None:
            self.engine.adapters.unload(name)

    def generate(
        self,
        prompts: str | Sequence[str | list[int]],
        params: SamplingParams | None = None,
        *,
        adapter: str | Sequence[str] = "",
        progress: bool | None = None,
    ) -> list[Completion]:
        """Completes prompts (text or token ids) together, in their order.

        A beam search gives up to `n` completions per prompt, best first.

        adapter: the LoRA adapter of all, or of each ("" for none). progress: show a bar; by default
        when standard error is a terminal.
        """
        given = [prompts] if isinstance(prompts, str) else list(prompts)
        ids = [self.tokenizer.encode(p) if isinstance(p, str) else p for p in given]
        adapters = [adapter] * len(ids) if isinstance(adapter, str) else list(adapter)
        return self._run(ids, params, progress, adapters)

    def chat(
        self,
        conversation: list[dict[str, Any]] | list[list[dict[str, Any]]],
        params: SamplingParams | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Answers one conversation or several: lists of {"role", "content"}."""
        many = (
            conversation if conversation and isinstance(conversation[0], list) else [conversation]
        )
        return self._run([self.encode_chat(c) for c in many], params, progress)  # type: ignore[arg-type]

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Ids of a conversation up to where the assistant speaks. Raises RequestError."""
        if self.template is None:
            raise RequestError(
                f"{self.name} has no chat template, so it cannot chat; use generate()"
            )
        return self.template.encode(messages)

    def embed(self, texts: str | Sequence[str]) -> list[Vector]:
        """One vector per text, pooled as the model says (decoders: the last state), in their order.

        Raises RequestError for a text longer than the context, and for models that only rank.
        """
        if self.task == "rank":
            raise RequestError(f"{self.name} ranks; it makes no embeddings")
        given = [texts] if isinstance(texts, str) else list(texts)
        pooled = self._pool([self.tokenizer.encode_segments(t) for t in given])
        return [self.pooling.finish(v) for v in pooled]

    def rank(self, query: str, documents: Sequence[str]) -> list[float]:
        """How each document goes with the query: a probability (cross-encoders) or a cosine."""
        if self.task != "rank":
            first, *others = (unit(v) for v in self.embed([query, *documents]))
            return [float(np.dot(first, v)) for v in others]
        pairs = [self.tokenizer.encode_segments(query, d) for d in documents]
        return [1 / (1 + math.exp(-float(v[0]))) for v in self._pool(pairs)]

    def _pool(self, texts: list[tuple[list[int], list[int]]]) -> list[Vector]:
        mode = "cls" if self.task == "rank" else self.pooling.mode
        found: dict[str, Vector] = {}
        wanted: list[str] = []
        try:
            for ids, types in texts:
                wanted.append(str(next(self._ids)))
                params = SamplingParams()
                self.engine.add(
                    Request(id=wanted[-1], prompt=ids, types=types, params=params, pool=mode)
                )
            while len(found) < len(wanted):
                for event in self.engine.step():
                    if event.error is not None:
                        raise EngineFailed(event.error)
                    found[event.id] = np.frombuffer(event.vector, np.float32)
        finally:
            for request_id in wanted:
                self.engine.abort(request_id)
        return [found[i] for i in wanted]

    def stream(self, prompt: list[int], params: SamplingParams | None = None) -> Iterator[str]:
        """The (best) answer to one prompt as it comes. Closing the iterator aborts it."""
        assembly = self._add(prompt, params)
        try:
            while assembly.finish is None:
                for event in self.engine.step():
                    if event.id != assembly.request.id or event.beam:
                        continue
                    if text := assembly.push(event):
                        yield text
                    if event.error is not None:
                        raise RequestError(event.error)
        finally:
            self.engine.abort(assembly.request.id)

    def _add(
        self, prompt: list[int], params: SamplingParams | None, adapter: str = ""
    ) -> _Assembly:
        params = params or self.defaults
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=secrets.randbits(62))
        if params.grammar is not None and self.engine.grammars is not None:
            self.engine.grammars.check(params.grammar)
        request = Request(id=str(next(self._ids)), prompt=prompt, params=params, adapter=adapter)
        self.engine.add(request)
        return _Assembly(self.tokenizer.bytes, request)

    def _run(
        self, prompts: list[list[int]], params: SamplingParams | None, progress: bool | None,
        adapters: list[str] | None = None,
    ) -> list[Completion]:  # fmt: skip
        assemblies: dict[str, list[_Assembly]] = {}
        try:
            for prompt, adapter in zip(prompts, adapters or [""] * len(prompts), strict=True):
                assembly = self._add(prompt, params, adapter)
                assemblies[assembly.request.id] = [assembly]
            show = sys.stderr.isatty() if progress is None else progress
            self._finish(assemblies, show)
        finally:
            for request_id in assemblies:
                self.engine.abort(request_id)
        return [a.completion() for texts in assemblies.values() for a in texts]

    def _finish(self, assemblies: dict[str, list[_Assembly]], show: bool) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        columns = (TextColumn("Generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), disable=not show) as bar:
            task = bar.add_task("", total=len(assemblies))
            left = set(assemblies)
            while left:
                for event in self.engine.step():
                    if event.id not in left:
                        continue
                    texts = assemblies[event.id]
                    if event.beam == len(texts):
                        texts.append(_Assembly(self.tokenizer.bytes, texts[0].request))
                    texts[event.beam].push(event)
                    if event.error is not None:
                        raise RequestError(event.error)
                    if texts[event.beam].finish is not None and not event.more:
                        self.engine.abort(event.id)  # a stop string may end it before the engine
                        left.discard(event.id)
                        bar.advance(task)
