"""A model that a server may load, unload and load again."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from octavo.checkpoint.hub import Located
from octavo.checkpoint.identity import check_unchanged
from octavo.checkpoint.progress import ProgressBar
from octavo.client.load import QueueLimits
from octavo.client.process import EngineProcessClient
from octavo.client.spawned import Spawned
from octavo.engine.constraint import TokenTable
from octavo.engine.defaults import GenerationConfig
from octavo.engine.open import OpenModel, open_model
from octavo.engine.plan import Plan
from octavo.errors import (
    EngineFailed,
    ModelChanged,
    ModelNotFound,
    Overloaded,
    RequestError,
    UsageError,
)
from octavo.generate.model import ServedModel
from octavo.generate.served import served_model, token_table
from octavo.server.registry import Entry, Registry
from octavo.server.sizes import SizeBounds
from octavo.text import ChatTemplate, Tokenizer, load_tokenizer
from octavo.text.chat import template_source

LOG = logging.getLogger("octavo.server")

if TYPE_CHECKING:
    from octavo.client.replicas import Replicas

    Engines = EngineProcessClient | Replicas


@dataclass(frozen=True)
class ModelOptions:
    """A model to serve. name, aliases: what clients call it. adapters: loaded with it, by name."""

    located: Located
    name: str
    aliases: tuple[str, ...] = ()
    chat_template: str | None = None
    queue: QueueLimits = QueueLimits()
    adapters: tuple[tuple[str, Path], ...] = ()
    lora: bool = False  # adapters may be loaded
    generation_config: GenerationConfig = "auto"
    pinned: bool = False
    mmproj: str = "auto"  # the file with a GGUF model's image encoder
    vision_dtype: str = "auto"
    device: str = "cpu"  # what computes
    replicas: int = 1  # engines
    routing: str = "cost"  # how one of them is chosen

    @property
    def also(self) -> tuple[str, ...]:
        """Every other name that the model goes by."""
        found = {self.located.name, *self.located.aliases, *self.aliases}
        return tuple(sorted(found - {self.name}))


@dataclass(frozen=True)
class _Front:
    """What is read of a model beside its weights: it is kept while the model is unloaded."""

    opened: OpenModel
    plan: Plan
    tokenizer: Tokenizer
    table: TokenTable


class ModelSource:
    """Opens, plans and loads a model.

    plan: gives the plan of the opened model; it may raise OctavoError. To be set before a model is
    loaded: progress, which is called with bytes that were packed; spawned, its first process.
    """

    def __init__(self, options: ModelOptions, plan: Callable[[OpenModel], Plan]) -> None:
        self._options = options
        self._make_plan = plan
        self.progress: Callable[[int], None] = lambda _: None
        self.spawned: Spawned | None = None
        self._lock = threading.Lock()
        self._planned: tuple[OpenModel, Plan] | None = None
        self._read: _Front | None = None
        self.created = int(time.time())
        self.adapters = {name: str(path) for name, path in options.adapters}
        self._loads = 0

    def planned(self) -> tuple[OpenModel, Plan]:
        """The model and its plan, made anew if its files have changed. Raises OctavoError."""
        with self._lock:
            if self._planned is not None:
                try:
                    check_unchanged(self._planned[0].checkpoint.states)
                except (ModelChanged, ModelNotFound):
                    self._planned = self._read = None
            if self._planned is None:
                o = self._options
                opened = open_model(
                    o.located.path, o.lora, mmproj=o.mmproj, vision_dtype=o.vision_dtype,
                    device=o.device,
                )  # fmt: skip
                self._planned = opened, self._make_plan(opened)
            return self._planned

    @property
    def total(self) -> int:
        return self._options.replicas * self.planned()[1].total

    @property
    def bounds(self) -> SizeBounds:
        opened, plan = self.planned()
        return SizeBounds(plan.context, opened.vocabulary)

    def _front(self) -> _Front:
        opened, plan = self.planned()
        if self._read is None or self._read.opened is not opened:
            tokenizer = load_tokenizer(opened.checkpoint)
            self._read = _Front(opened, plan, tokenizer, token_table(tokenizer))
        return self._read

    async def load(self) -> ServedModel:
        """The model with a new engine, which is ready. Raises OctavoError."""
        client = self._client(*await asyncio.to_thread(self.planned))
        served = None
        starting = asyncio.create_task(client.start())  # while this process reads the tokenizer
        try:
            front = await asyncio.to_thread(self._front)
            client.use(front.table)
            served = self._served(front, client)
            if served.template is not None and not self._loads:
                await asyncio.to_thread(served.template.check)
            await starting
            await self._load_adapters(client)
        except BaseException:
            await client.close()
            await asyncio.gather(starting, return_exceptions=True)
            if served is not None:
                served.end_workers()
            raise
        self._loads += 1
        return served

    def _client(self, opened: OpenModel, plan: Plan) -> Engines:
        """An engine that has not begun to load, or as many as there are replicas."""
        options = self._options
        files = {**opened.checkpoint.states, **(plan.draft.files if plan.draft else {})}
        clients = []
        for i in range(options.replicas):
            name = f"{options.name}/{i}" if options.replicas > 1 else options.name
            clients.append(
                EngineProcessClient(
                    str(options.located.path), plan, opened.vocabulary,
                    options.queue.divided(options.replicas), self.progress, files, name=name,
                    spawned=self.spawned, mmproj=opened.mmproj,
                )
            )  # fmt: skip
            self.spawned = None
        if len(clients) == 1:
            return clients[0]
        from octavo.client.replicas import Replicas  # which few servers need

        return Replicas(clients, options.routing)

    def _served(self, front: _Front, client: Engines) -> ServedModel:
        options = self._options
        source = options.chat_template or template_source(front.opened.checkpoint)
        template = ChatTemplate(source, front.tokenizer) if source else None
        served = served_model(
            front.opened, options.located, front.tokenizer, front.table, template, client,
            front.plan.context, options.generation_config, options.name,
        )  # fmt: skip
        return replace(served, aliases=options.also, created=self.created)

    async def _load_adapters(self, client: Engines) -> None:
        """Loads the adapters. Raises UsageError the first time; later, those that are gone go.
        Raises RequestError if the engine ends meanwhile."""
        for name, path in list(self.adapters.items()):
            try:
                await client.load_adapter(name, path)
            except RequestError as e:
                if not self._loads:
                    raise UsageError(f"--lora {name}: {e}") from None
                if isinstance(e, EngineFailed | Overloaded):
                    raise
                LOG.error("adapter %s is not loaded again: %s", name, e)
                del self.adapters[name]

    async def unload(self, model: ServedModel) -> None:
        self.adapters = cast("Engines", model.client).adapter_paths
        await model.close()


NamedSource = tuple[ModelOptions, ModelSource]
Fetch = Callable[[str, ProgressBar], NamedSource | None]  # may block; raises OctavoError


def add_source(models: Registry, options: ModelOptions, source: ModelSource) -> Entry:
    """Adds a model that can be loaded. Raises UsageError for a name that is taken."""
    return models.add(options.name, None, options.also, source, options.pinned)
