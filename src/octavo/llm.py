"""The Python API: a model in this process.

llm = octavo.LLM("smollm2")
llm.generate(["Once upon a time"], octavo.SamplingParams(max_tokens=32))
"""

from __future__ import annotations

import itertools
import secrets
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from octavo.checkpoint.hub import Progress, locate, no_progress
from octavo.checkpoint.pooling import Vector, read_pooling, unit
from octavo.client.in_process import EventStream, InProcessEngine
from octavo.engine.constraint import TokenTable
from octavo.engine.defaults import GenerationConfig, default_params
from octavo.engine.engine import Engine
from octavo.engine.events import BeamText, Ended, Pooled, PromptLogprobs, Token, TokenEvent, ends
from octavo.engine.host import available_memory
from octavo.engine.loader import load_engine, open_model
from octavo.engine.plan import make_plan, parse_size
from octavo.engine.request import Request, SamplingParams
from octavo.engine.stats import EngineStats
from octavo.errors import EngineFailed, RequestError, UsageError
from octavo.generate.output import beam_tokens
from octavo.text import ChatTemplate, TextStream, Tokenizer, load_tokenizer
from octavo.text.chat import joined, template_source

KV_DTYPES = ("auto", "bf16", "int8", "f32")


Conversation = list[dict[str, Any]]


@dataclass(frozen=True)
class Completion:
    """A finished answer.

    logprobs: of `tokens`, when asked for; top_logprobs: beside each, its likeliest alternatives.
    prompt_logprobs: of every prompt token (None for the first), when asked for, with
    prompt_top_logprobs likewise. score: of a beam search's text.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[dict[int, float]] | None = None
    score: float | None = None


class _Assembly:
    """Collects one request's events into a Completion."""

    def __init__(self, table: list[bytes], request: Request) -> None:
        self.request = request
        self.finish: str | None = None
        self._stream = TextStream(table, request.params.stop_strings)
        self._text = ""
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[dict[int, float]] = []
        self._prompt: list[float | None] = [None]
        self._prompt_top: list[dict[int, float]] = [{}]
        self._cached = 0
        self._score: float | None = None

    def push(self, event: TokenEvent) -> str:
        """Text that became showable."""
        self._cached = event.cached
        if isinstance(event, BeamText):
            self._score = event.score
            return "".join([self.push(token) for token in beam_tokens(event)])
        text = ""
        if isinstance(event, PromptLogprobs):
            for logprob, alternatives in event.logprobs:
                self._prompt.append(logprob)
                self._prompt_top.append(dict(alternatives))
        elif isinstance(event, Ended):
            text, self.finish = self._stream.push(None, event.finish)
        elif isinstance(event, Token):
            if event.finish != "stop":
                self._tokens.append(event.token)
                self._logprobs.append(event.logprob)
                self._top.append(dict(event.top))
            text, self.finish = self._stream.push(event.token, event.finish)
        self._text += text
        return text

    def completion(self) -> Completion:
        params = self.request.params
        wanted, of_prompt = params.logprobs is not None, params.prompt_logprobs is not None
        return Completion(
            text=self._text,
            tokens=self._tokens,
            finish_reason=self.finish or "abort",
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self._cached,
            logprobs=self._logprobs if wanted else None,
            top_logprobs=self._top if wanted else None,
            prompt_logprobs=self._prompt if of_prompt else None,
            prompt_top_logprobs=self._prompt_top if of_prompt else None,
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
    keep packed weights on disk for the next start. generation_config: "none" forgets the sampling
    parameters that the model's files recommend. loading: opens a progress bar, given what it
    is for and how many bytes.

    Any number of threads may call, and streams may be read by turns: what runs at the same time is
    computed in one batch. `close` (or `with`) frees the memory; later calls raise EngineFailed.
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
        generation_config: GenerationConfig = "auto",
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
            opened.compiled, name=self.name, memory=memory, context=context, threads=threads,
            kv_dtype=kv_dtype, packed=packed_cache,
            adapters=parse_size(lora_memory, available_memory()) if adapters is not None else 0,
        )  # fmt: skip
        opened = open_model(located.path, adapters is not None, self.plan.context)
        with loading("Loading", opened.checkpoint.nbytes) as advance:
            engine = load_engine(opened, self.plan, token_table(self.tokenizer), advance)
        self._engine = InProcessEngine(engine)
        self._close = weakref.finalize(self, self._engine.close)
        for adapter, folder in (adapters or {}).items():
            self.load_adapter(adapter, folder)
        if self.template is not None:
            self.template.check()
        self.task = opened.task
        self.pooling = read_pooling(opened.checkpoint, not opened.program.causal)
        self.defaults = default_params(opened.checkpoint, located.sampling, generation_config)
        self._ids = itertools.count()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what runs and frees the model's memory; so does the end of the last reference."""
        self._close()

    def stats(self) -> EngineStats:
        """What the engine holds now, and its counts since the start."""
        return self._engine.stats()

    def load_adapter(self, name: str, folder: str) -> None:
        """Makes a LoRA adapter (a PEFT folder) usable by name. Raises RequestError."""

        def load(engine: Engine) -> None:
            if engine.adapters is None:
                raise UsageError("give LLM(adapters={}) to load adapters")
            engine.adapters.load(name, Path(folder))

        self._engine.call(load)

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter. Raises RequestError."""

        def unload(engine: Engine) -> None:
            if engine.adapters is not None:
                engine.adapters.unload(name)

        self._engine.call(unload)

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
        adapters = [adapter] * len(given) if isinstance(adapter, str) else list(adapter)
        return self._run(given, params, progress, adapters)

    def chat(
        self,
        conversation: str | Conversation | list[Conversation],
        params: SamplingParams | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Answers one conversation or several: lists of {"role", "content"}, or a user's text."""
        many = isinstance(conversation, list) and conversation and isinstance(conversation[0], list)
        given: Any = conversation if many else [conversation]
        return self._run([self.encode_chat(c) for c in given], params, progress)

    def encode_chat(self, messages: str | Conversation) -> list[int]:
        """Ids of a conversation up to where the assistant speaks. Raises RequestError."""
        if self.template is None:
            raise RequestError(
                f"{self.name} has no chat template, so it cannot chat; use generate()"
            )
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.template.encode([m | {"content": joined(m.get("content"))} for m in messages])

    def embed(self, texts: str | Sequence[str]) -> list[Vector]:
        """One vector per text, pooled as the model says (decoders: the last state), in their order.

        Raises RequestError for a text longer than the context, and for models that only rank.
        """
        if self.task == "rank":
            raise RequestError(f"{self.name} ranks; it makes no embeddings")
        given = [texts] if isinstance(texts, str) else list(texts)
        prepare, encode = self.pooling.prepare, self.tokenizer.encode_segments
        pooled = self._pool([encode(prepare(t)) for t in given])
        return [self.pooling.finish(v) for v in pooled]

    def rank(self, query: str, documents: Sequence[str]) -> list[float]:
        """How each document goes with the query: a cross-encoder's score, or a cosine."""
        if self.task != "rank":
            first, *others = (unit(v) for v in self.embed([query, *documents]))
            return [float(np.dot(first, v)) for v in others]
        pairs = [self.tokenizer.encode_segments(query, d) for d in documents]
        return [self.pooling.score(float(v[0])) for v in self._pool(pairs)]

    def _pool(self, texts: list[tuple[list[int], list[int]]]) -> list[Vector]:
        mode = "cls" if self.task == "rank" else self.pooling.mode
        requests = [
            Request(
                id=self._new_id(),
                prompt=ids,
                token_type_ids=types,
                params=SamplingParams(),
                pool=mode,
            )
            for ids, types in texts
        ]
        found: dict[str, Vector] = {}
        with closing(self._engine.submit(requests)) as events:
            for event in events:
                if isinstance(event, Ended):
                    raise EngineFailed(event.error or event.finish)
                if isinstance(event, Pooled):
                    found[event.id] = np.frombuffer(event.vector, np.float32)
        return [found[r.id] for r in requests]

    def stream(
        self, prompt: str | list[int], params: SamplingParams | None = None, *, adapter: str = ""
    ) -> Iterator[str]:
        """The (best) answer to one prompt as it comes. Closing the iterator aborts it."""
        request = self._request(prompt, params, adapter)
        assembly = _Assembly(self.tokenizer.bytes, request)
        with closing(self._engine.submit([request])) as events:
            for event in events:
                if isinstance(event, BeamText) and event.index:
                    continue
                if text := assembly.push(event):
                    yield text
                if isinstance(event, Ended) and event.error is not None:
                    raise RequestError(event.error)
                if assembly.finish is not None:  # a stop string may end it before the engine
                    return

    def _new_id(self) -> str:
        return str(next(self._ids))

    def _request(
        self, prompt: str | list[int], params: SamplingParams | None, adapter: str
    ) -> Request:
        params = params or self.defaults
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=secrets.randbits(62))
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return Request(id=self._new_id(), prompt=ids, params=params, adapter=adapter)

    def _run(
        self, prompts: Sequence[str | list[int]], params: SamplingParams | None,
        progress: bool | None, adapters: list[str] | None = None,
    ) -> list[Completion]:  # fmt: skip
        requests = [
            self._request(prompt, params, adapter)
            for prompt, adapter in zip(prompts, adapters or [""] * len(prompts), strict=True)
        ]
        show = sys.stderr.isatty() if progress is None else progress
        with closing(self._engine.submit(requests)) as events:
            assemblies = self._assemble(requests, events, show)
        return [a.completion() for r in requests for a in assemblies[r.id]]

    def _assemble(
        self, requests: list[Request], events: EventStream, show: bool
    ) -> dict[str, list[_Assembly]]:
        """Every request's texts (several for a beam search) when all have ended."""
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        assemblies = {r.id: [_Assembly(self.tokenizer.bytes, r)] for r in requests}
        columns = (TextColumn("Generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), disable=not show) as bar:
            task = bar.add_task("", total=len(requests))
            for event in events:
                texts = assemblies[event.id]
                index = event.index if isinstance(event, BeamText) else 0
                if index == len(texts):
                    texts.append(_Assembly(self.tokenizer.bytes, texts[0].request))
                texts[index].push(event)
                if isinstance(event, Ended) and event.error is not None:
                    raise RequestError(event.error)
                if isinstance(event, BeamText) and not ends(event):
                    continue
                if texts[index].finish is not None:
                    events.finish(event.id)  # a stop string may end it before the engine
                    bar.advance(task)
        return assemblies
