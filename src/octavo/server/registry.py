"""The models that a server serves, by their public names."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from octavo.client.base import EngineClient
from octavo.errors import (
    DoesNotFit,
    InvalidValue,
    OctavoError,
    Overloaded,
    RequestError,
    UsageError,
)
from octavo.generate.model import ServedModel
from octavo.server.sizes import SizeBounds

LOG = logging.getLogger("octavo.server")
State = Literal["unloaded", "loading", "ready", "unavailable"]
LISTED = 8  # names in an error


class NotFound(RequestError):
    status = 404


def unusable(name: str, error: OctavoError) -> RequestError:
    """What a client is told of a model that cannot be loaded; where its files lie, only the log."""
    LOG.error("the model %s cannot be loaded: %s", name, error)
    if isinstance(error, DoesNotFit):
        return RequestError(str(error), "model", "insufficient_memory")
    reason = f"the model {name!r} cannot be loaded ({type(error).__name__}); the log says why"
    return RequestError(reason, "model", "invalid_model")


class Source(Protocol):
    """What a model is loaded from, as often as it is wanted. created: when it was found."""

    created: int

    @property
    def total(self) -> int:
        """Bytes that the loaded model takes at most. May block. Raises OctavoError."""
        ...

    @property
    def bounds(self) -> SizeBounds:
        """What limits the body of a request. May block. Raises OctavoError."""
        ...

    @property
    def adapters(self) -> Mapping[str, str]:
        """The LoRA adapters that the model is loaded with: names and folders."""
        ...

    async def load(self) -> ServedModel:
        """The model with a new engine, which is ready. Raises OctavoError."""
        ...

    async def unload(self, model: ServedModel) -> None:
        """Ends the model's engine; the next load brings its adapters back."""
        ...


@dataclass(eq=False)
class Entry:
    """A name with its model, which is None while it is not loaded.

    source: None for a model that comes loaded. users: leases that are held, whose end `idle`
    tells; waiting: those to be had once the model is loaded; used: when the last was given back.
    pinned: not unloaded for another model. leaving: unloaded as soon as it is idle.
    """

    name: str
    aliases: tuple[str, ...]
    client: EngineClient | None = None
    source: Source | None = None
    model: ServedModel | None = None
    pinned: bool = False
    users: int = 0
    used: float = 0.0
    waiting: list[ModelLease] = field(default_factory=list)
    leaving: bool = False
    loading: bool = False
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def state(self) -> State:
        if self.model is None:
            return "unloaded" if self.source is not None and not self.loading else "loading"
        return "ready" if self.client is not None and self.client.ready else "unavailable"

    @property
    def adapters(self) -> list[str]:
        """Names of the LoRA adapters that requests may ask for."""
        if self.client is not None:
            return self.client.adapters
        return list(self.source.adapters) if self.source is not None else []

    @property
    def loaded(self) -> ServedModel:
        """The model. Raises Overloaded while it is not loaded."""
        if self.model is None:
            raise Overloaded(f"the model {self.name!r} is still loading", code="loading")
        return self.model

    def called(self, name: str | None) -> ServedModel:
        """The loaded model under the name of a request, which may be an adapter's."""
        if name is None or name in (self.name, *self.aliases):
            return self.loaded
        return replace(self.loaded, name=name, adapter=name)


@dataclass(eq=False)
class ModelLease:
    """The use of a model, which is not unloaded before it is given back."""

    entry: Entry
    name: str | None
    held: bool = False

    @property
    def model(self) -> ServedModel:
        return self.entry.called(self.name)

    def grant(self) -> None:
        """Begins: the model is loaded."""
        self.held = True
        self.entry.users += 1
        self.entry.idle.clear()

    def release(self) -> None:
        """Gives the model back. May be called again."""
        if self.held:
            self.held = False
            self.entry.users -= 1
            self.entry.used = time.monotonic()
            if not self.entry.users:
                self.entry.idle.set()


class Loader(Protocol):
    """Loads models when they are wanted, and unloads others for them."""

    async def admit(self, lease: ModelLease) -> None:
        """Grants a lease once its model is loaded. Raises RequestError if it cannot be."""
        ...

    async def unload(self, entry: Entry) -> None:
        """Unloads a model once it is idle; requests that come meanwhile load it again."""
        ...

    async def close(self) -> None:
        """Ends what is being loaded."""
        ...


class Registry:
    """Models by name, alias and adapter. Entries come and go while the server runs.

    All of it is used by the event loop, and `get` and `bounds` by threads too.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self.loader: Loader | None = None  # of entries with a source
        self.starting = False  # models are being loaded for the first time: no request waits
        self.draining = False  # set when the server is told to stop: no new work is accepted

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def add(
        self, name: str, client: EngineClient | None = None, aliases: Sequence[str] = (),
        source: Source | None = None, pinned: bool = False,
    ) -> Entry:  # fmt: skip
        """Adds a model that is not loaded yet. Raises UsageError for a name that is taken."""
        entry = Entry(name, tuple(aliases), client, source, pinned=pinned)
        for each in (name, *entry.aliases):
            if self.taken(each):
                raise UsageError(f"two models are called {each!r}", "--name NAME")
        self._entries[name] = entry
        return entry

    def remove(self, name: str) -> Entry:
        """Removes a model: new requests do not find it. Its engine is left to the caller."""
        return self._entries.pop(name)

    def taken(self, name: str) -> bool:
        """True for the name of a model, an alias or an adapter."""
        return self._find(name) is not None

    def _find(self, name: str) -> Entry | None:
        if name in self._entries:
            return self._entries[name]
        return next((e for e in self if name in e.aliases or name in e.adapters), None)

    def entry(self, name: str | None) -> Entry:
        """The entry of a model, alias or adapter; None: the only one. Raises RequestError."""
        if name is None:
            if len(self._entries) == 1:
                return next(iter(self))
            raise InvalidValue(f"model must be given; this server has {self._names()}", "model")
        if (found := self._find(name)) is not None:
            return found
        loading = (e for e in self if e.model is None and (self.starting or e.source is None))
        if first := next(loading, None):
            return first  # it may yet get an adapter of that name
        raise NotFound(
            f"no model {name[:64]!r} here; this server has {self._names()}",
            "model",
            "model_not_found",
        )

    def get(self, name: str | None) -> ServedModel:
        """The loaded model of a name, with its adapter if `name` is one's.

        Raises NotFound for an unknown name, Overloaded while the model is not loaded.
        """
        return self.entry(name).called(name)

    async def acquire(self, name: str | None) -> ModelLease:
        """The use of a model, which is loaded first if it is not. Raises RequestError."""
        lease = ModelLease(self.entry(name), name)
        await self.grant(lease)
        return lease

    async def grant(self, lease: ModelLease) -> None:
        """Grants a lease once its model is loaded. Raises RequestError."""
        entry = lease.entry
        if entry.model is not None and not entry.leaving:
            return lease.grant()
        self.check_open()
        if self.loader is None or entry.source is None or self.starting:
            raise Overloaded(f"the model {entry.name!r} is still loading", code="loading")
        await self.loader.admit(lease)

    def bounds(self, name: str | None) -> SizeBounds:
        """What limits the body of a request to a model. May block. Raises RequestError."""
        entry = self.entry(name)
        if entry.model is None and entry.source is not None and not self.starting:
            try:
                return entry.source.bounds
            except OctavoError as e:
                raise unusable(entry.name, e) from None
        model = entry.loaded
        return SizeBounds(model.context, model.vocabulary)

    def check_loaded(self) -> None:
        """Raises Overloaded unless some model is loaded, or can be when it is asked for."""
        if not any(e.model or (e.source and not self.starting) for e in self):
            raise Overloaded("the model is still loading", code="loading")

    def check_open(self) -> None:
        """Raises Overloaded once the server is told to stop."""
        if self.draining:
            raise Overloaded("the server is shutting down", code="shutting_down")

    def adapter_client(self, adapter: str) -> EngineClient:
        """The engine that has an adapter. Raises InvalidValue if none has."""
        for entry in self:
            if entry.client is not None and adapter in entry.client.adapters:
                return entry.client
        raise InvalidValue(f"no adapter {adapter[:64]!r} is loaded", "lora_name")

    @property
    def ready(self) -> bool:
        """True while every model can take requests: it is loaded, or will be for the first."""
        waits = [e.source is not None and e.model is None for e in self]
        able = [e.state == "ready" or wait for e, wait in zip(self, waits, strict=True)]
        return bool(able) and all(able) and not self.starting and not self.draining

    def _names(self) -> str:
        names = [repr(e.name) for e in self]
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        return ", ".join(names[:LISTED]) + more

    async def close(self) -> None:
        """Ends every request with an error and frees every model."""
        if self.loader is not None:
            await self.loader.close()
        for entry in self:
            if entry.client is not None:
                await entry.client.close()
