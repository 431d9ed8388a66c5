"""The Python API: a model in this process.

llm = octavo.LLM("smollm2")
llm.generate(["Once upon a time"], octavo.SamplingParams(max_tokens=32))

async with octavo.AsyncLLM("smollm2") as llm:
    await llm.chat("Hello")
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any, Unpack

from octavo.checkpoint.pooling import Vector
from octavo.client.event_loop import EventLoop
from octavo.client.in_process import InProcessClient
from octavo.engine.request import SamplingParams
from octavo.engine.stats import EngineStats
from octavo.errors import EngineFailed, InvalidValue, RequestError, engine_closed
from octavo.generate.choices import completions, generate, generate_whole
from octavo.generate.embed import encode_inputs, encode_pairs, pool, score
from octavo.generate.load import LoadOptions, load
from octavo.generate.media import MediaReader
from octavo.generate.model import ServedModel
from octavo.generate.prepare import PreparedRequest, encode_chat, prepare
from octavo.generate.progress import Done, progress_bar
from octavo.generate.reply import Completion, TextDelta, Usage
from octavo.generate.request import (
    CHAT_NAMES,
    ChatOptions,
    Conversation,
    GenerationRequest,
    chat_request,
)
from octavo.program import Task
from octavo.text import ChatTemplate, Tokenizer


def _release(model: ServedModel, client: InProcessClient) -> None:
    """Frees a model that nobody refers to any more."""
    client.stop()
    model.end_workers()


class _Loaded:
    """What is known of a model."""

    model: ServedModel

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer

    @property
    def template(self) -> ChatTemplate | None:
        return self.model.template

    @property
    def defaults(self) -> SamplingParams:
        """Sampling parameters of calls that give none."""
        return self.model.defaults

    @property
    def task(self) -> Task:
        return self.model.task

    @property
    def context(self) -> int:
        """Most tokens of a sequence."""
        return self.model.context

    def encode_chat(self, messages: str | Conversation) -> list[int]:
        """Ids of a conversation up to where the assistant speaks. Raises RequestError."""
        return encode_chat(chat_request(messages, self.defaults, {}), self.model)


class AsyncLLM(_Loaded):
    """A loaded model (demo name, Hugging Face id, folder or .gguf), for asynchronous callers.

    Takes the options of LLM, or a ServedModel that is loaded already. Loading happens here and
    takes its time; `await asyncio.to_thread(AsyncLLM, model)` lets the event loop go on.

    Any number of tasks, event loops and threads may call: what runs at the same time is computed in
    one batch. Cancelling a call ends its requests. `close` (or `async with`) frees the memory, of
    a ServedModel too; later calls raise EngineFailed.
    """

    def __init__(self, model: str | ServedModel, **options: Unpack[LoadOptions]) -> None:
        if not isinstance(model, str) and options:
            raise TypeError(f"a model that is loaded already takes no {', '.join(options)}")
        self.model = load(model, **options) if isinstance(model, str) else model
        self._closed, self._media = False, MediaReader()
        client = self.model.client
        if isinstance(model, str) and isinstance(client, InProcessClient):
            weakref.finalize(self, _release, self.model, client)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends what runs and frees the model's memory, for all who use it. May be called again.

        So does the end of the last reference, but for a ServedModel: who loaded it closes it.
        """
        self._closed = True
        await self.model.close()

    async def stats(self) -> EngineStats:
        """What the engine holds now, and its counts since the start.

        Raises EngineFailed while there is no engine.
        """
        client = self.model.client
        if isinstance(client, InProcessClient):
            return await client.read_stats()
        found, names = client.stats, EngineStats.__struct_fields__
        if not found.keys() >= set(names):
            raise EngineFailed("there is no engine now to ask", code="engine_failed")
        return EngineStats(**{name: found[name] for name in names})

    async def load_adapter(self, name: str, folder: str) -> None:
        """Makes a LoRA adapter (a PEFT folder) usable by name. Raises RequestError."""
        await self.model.client.load_adapter(name, folder)

    async def unload_adapter(self, name: str) -> None:
        """Forgets an adapter. Raises RequestError."""
        await self.model.client.unload_adapter(name)

    async def generate(
        self,
        prompts: str | Sequence[str | list[int]],
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        best_of: int | None = None,
        adapter: str | Sequence[str] = "",
        done: Done = lambda: None,
    ) -> list[Completion]:
        """Completes prompts (text or token ids) together, in their order; `n` completions of each.

        best_of: how many are made of each, of which the `n` likeliest are given. A beam search
        gives up to `n` of its own, best first. adapter: the LoRA adapter of all, or of each ("" for
        none). done: called whenever a prompt's completions are finished.
        """
        given = [prompts] if isinstance(prompts, str) else list(prompts)
        params = params or self.defaults
        requests = [
            GenerationRequest(prompts=[p], sampling=params, n=n, best_of=best_of) for p in given
        ]
        adapters = [adapter] * len(given) if isinstance(adapter, str) else list(adapter)
        if len(adapters) != len(given):
            raise InvalidValue(f"{len(adapters)} adapters for {len(given)} prompts", "adapter")
        return await self._run(lambda: requests, adapters, done)

    async def chat(
        self,
        conversation: str | Conversation | Sequence[Conversation],
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        done: Done = lambda: None,
        **options: Unpack[ChatOptions],
    ) -> list[Completion]:
        """Answers one conversation or several: lists of {"role", "content"}, or a user's text.

        Completions have `tool_calls` and `reasoning` beside `text`. For options see ChatOptions.
        """
        given: Any = conversation if _several(conversation) else [conversation]
        params, adapter = params or self.defaults, options.get("adapter") or ""
        return await self._run(
            lambda: [chat_request(c, params, options, n) for c in given],
            [adapter] * len(given),
            done,
        )

    async def stream(
        self, prompt: str | list[int], params: SamplingParams | None = None, *, adapter: str = ""
    ) -> AsyncGenerator[str, None]:
        """The (best) completion of one prompt as it comes. Closing the iterator aborts it."""
        request = GenerationRequest(prompts=[prompt], sampling=params or self.defaults)
        async with aclosing(self._deltas(lambda: request, adapter)) as deltas:
            async for delta in deltas:
                if delta.text:
                    yield delta.text

    async def stream_chat(
        self,
        conversation: str | Conversation,
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[TextDelta, None]:
        """The answer to a conversation as it comes: text, reasoning and pieces of tool calls."""
        given, adapter = params or self.defaults, options.get("adapter") or ""
        asked = self._deltas(lambda: chat_request(conversation, given, options), adapter)
        async with aclosing(asked) as deltas:
            async for delta in deltas:
                yield delta

    async def embed(self, texts: str | Sequence[str]) -> list[Vector]:
        """One vector per text, pooled as the model says (decoders: the last state), in their order.

        Raises RequestError for a text longer than the context, and for models that only rank.
        """
        self.model.require("embed")
        given = [texts] if isinstance(texts, str) else list(texts)
        with _named({"inputs": "texts"}):
            segments = await asyncio.to_thread(encode_inputs, given, self.model)
        return [self.model.pooling.finish(v) for v in await pool(self.model, segments)]

    async def rank(self, query: str, documents: Sequence[str]) -> list[float]:
        """How each document goes with the query: a cross-encoder's score, or a cosine.

        Raises RequestError.
        """
        if isinstance(documents, str):
            raise InvalidValue("documents is one text; a list of texts is taken", "documents")
        pairs = [(query, document) for document in documents]
        with _named({"inputs": "query"}):
            await asyncio.to_thread(encode_inputs, [query], self.model)
        with _named({"pairs": "documents"}):
            segments = await asyncio.to_thread(encode_pairs, pairs, self.model)
        return await score(self.model, pairs, segments)

    async def _run(
        self, make: Callable[[], list[GenerationRequest]], adapters: Sequence[str], done: Done
    ) -> list[Completion]:
        """Runs requests together, or none of them if one is refused."""

        async def one(job: PreparedRequest) -> list[Completion]:
            usage = Usage(prompt=job.prompt_tokens, images=job.image_tokens)
            found = completions(job, await generate_whole(job, usage), usage)
            done()
            return found

        with _named():
            jobs = await self._prepared(make, adapters)
            tasks = [asyncio.ensure_future(one(job)) for job in jobs]
            try:
                return [c for found in await asyncio.gather(*tasks) for c in found]
            finally:  # after a failure the others need not go on
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _deltas(
        self, make: Callable[[], GenerationRequest], adapter: str
    ) -> AsyncGenerator[TextDelta, None]:
        """The deltas of a request's first choice."""
        with _named():
            (job,) = await self._prepared(lambda: [make()], [adapter])
            async with aclosing(generate(job, Usage(prompt=job.prompt_tokens))) as deltas:
                async for delta in deltas:
                    if delta.choice == 0:
                        yield delta
                        if delta.finish:
                            return

    async def _prepared(
        self, make: Callable[[], list[GenerationRequest]], adapters: Sequence[str]
    ) -> list[PreparedRequest]:
        if self._closed:
            raise engine_closed()

        asked = await asyncio.to_thread(make)
        read = await asyncio.gather(*(self._media.read(r, self.model) for r in asked))

        def work() -> list[PreparedRequest]:
            pairs = zip(read, adapters, strict=True)
            return [prepare(r, replace(self.model, adapter=a)) for r, a in pairs]

        return await asyncio.to_thread(work)


@contextmanager
def _named(names: Mapping[str, str] = CHAT_NAMES) -> Iterator[None]:
    """Has errors name the arguments of a call, or the fields of ChatOptions."""
    try:
        yield
    except RequestError as e:
        unknown = e.code == "model_not_found"  # of this model's adapters
        raise e.renamed({"model": "adapter"} if unknown else names) from None


def _several(conversation: str | Conversation | Sequence[Conversation]) -> bool:
    """Whether there are several conversations, not one."""
    return not isinstance(conversation, Mapping | str) and isinstance(
        next(iter(conversation), None), Sequence
    )


class LLM(_Loaded):
    """A loaded model (demo name, Hugging Face id, folder or .gguf).

    For options see LoadOptions: memory, context, threads, kv_dtype, adapters, chat_template, …;
    a ServedModel, which is loaded already, takes none.

    Any number of threads may call, and streams may be read by turns: what runs at the same time is
    computed in one batch. Ctrl-C ends the requests of a call; the model stays usable. `close` (or
    `with`) frees the memory; later calls raise EngineFailed.
    Raises OctavoError when the model cannot be found, read or fitted.
    """

    def __init__(self, model: str | ServedModel, **options: Unpack[LoadOptions]) -> None:
        self._llm = AsyncLLM(model, **options)
        self.model = self._llm.model
        self._loop = EventLoop()
        self._stop = weakref.finalize(self, self._loop.stop)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Like AsyncLLM.close."""
        if self._stop.alive:
            self._loop.finish(self._llm.close)
            self._stop()

    def stats(self) -> EngineStats:
        """What the engine holds now, and its counts since the start."""
        return self._loop.run(self._llm.stats())

    def load_adapter(self, name: str, folder: str) -> None:
        """Makes a LoRA adapter (a PEFT folder) usable by name. Raises RequestError."""
        self._loop.run(self._llm.load_adapter(name, folder))

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter. Raises RequestError."""
        self._loop.run(self._llm.unload_adapter(name))

    def generate(
        self,
        prompts: str | Sequence[str | list[int]],
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        best_of: int | None = None,
        adapter: str | Sequence[str] = "",
        progress: bool | None = None,
    ) -> list[Completion]:
        """Like AsyncLLM.generate.

        progress: show a bar; by default when standard error is a terminal.
        """
        count = 1 if isinstance(prompts, str) else len(prompts)
        with progress_bar(progress, count) as done:
            work = self._llm.generate(
                prompts, params, n=n, best_of=best_of, adapter=adapter, done=done
            )
            return self._loop.run(work)

    def chat(
        self,
        conversation: str | Conversation | Sequence[Conversation],
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        progress: bool | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[Completion]:
        """Like AsyncLLM.chat. progress: as for generate."""
        with progress_bar(progress, len(conversation) if _several(conversation) else 1) as done:
            return self._loop.run(self._llm.chat(conversation, params, n=n, done=done, **options))

    def stream(
        self, prompt: str | list[int], params: SamplingParams | None = None, *, adapter: str = ""
    ) -> Generator[str, None, None]:
        """The (best) completion of one prompt as it comes. Closing the iterator aborts it."""
        yield from self._loop.iterate(self._llm.stream(prompt, params, adapter=adapter))

    def stream_chat(
        self,
        conversation: str | Conversation,
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Generator[TextDelta, None, None]:
        """The answer to a conversation as it comes: text, reasoning and pieces of tool calls."""
        yield from self._loop.iterate(self._llm.stream_chat(conversation, params, **options))

    def embed(self, texts: str | Sequence[str]) -> list[Vector]:
        """Like AsyncLLM.embed."""
        return self._loop.run(self._llm.embed(texts))

    def rank(self, query: str, documents: Sequence[str]) -> list[float]:
        """Like AsyncLLM.rank."""
        return self._loop.run(self._llm.rank(query, documents))
