"""The models that a server serves, by their public names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from octavo.client.base import EngineClient
from octavo.errors import InvalidValue, Overloaded, RequestError, UsageError
from octavo.generate.model import ServedModel
from octavo.server.sizes import Bounds

State = Literal["loading", "ready", "unavailable"]
LISTED = 8  # names in an error


class NotFound(RequestError):
    status = 404


@dataclass
class Entry:
    """A name with its engine. `model` is None until the model is loaded."""

    name: str
    aliases: tuple[str, ...]
    client: EngineClient
    model: ServedModel | None = None

    @property
    def state(self) -> State:
        if self.model is None:
            return "loading"
        return "ready" if self.client.ready else "unavailable"

    @property
    def loaded(self) -> ServedModel:
        """The model. Raises Overloaded while it is loading."""
        if self.model is None:
            raise Overloaded(f"the model {self.name!r} is still loading", code="loading")
        return self.model


class Registry:
    """Models by name, alias and adapter. Entries come and go while the server runs.

    All of it is used by the event loop, and `get` by threads too.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self.draining = False  # set when the server is told to stop: no new work is accepted

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def add(self, name: str, client: EngineClient, aliases: Sequence[str] = ()) -> Entry:
        """Adds a model that is still loading. Raises UsageError for a name that is taken."""
        entry = Entry(name, tuple(aliases), client)
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
        return next((e for e in self if name in e.aliases or name in e.client.adapters), None)

    def entry(self, name: str | None) -> Entry:
        """The entry of a model, alias or adapter; None: the only one. Raises RequestError."""
        if name is None:
            if len(self._entries) == 1:
                return next(iter(self))
            raise InvalidValue(f"model must be given; this server has {self._names()}", "model")
        if (found := self._find(name)) is not None:
            return found
        if loading := next((e for e in self if e.model is None), None):
            return loading  # it may yet get an adapter of that name
        raise NotFound(
            f"no model {name[:64]!r} here; this server has {self._names()}",
            "model",
            "model_not_found",
        )

    def get(self, name: str | None) -> ServedModel:
        """The model of a request, with its adapter if `name` is one's.

        Raises NotFound for an unknown name, Overloaded while the model is loading.
        """
        entry = self.entry(name)
        model = entry.loaded
        if name is None or name in (entry.name, *entry.aliases):
            return model
        return replace(model, name=name, adapter=name)

    def bounds(self, name: str | None) -> Bounds:
        """What limits the body of a request to a model. Raises RequestError."""
        model = self.get(name)
        return Bounds(model.context, model.vocabulary)

    def check_loaded(self) -> None:
        """Raises Overloaded unless some model is loaded."""
        entries = list(self)
        if not any(e.model for e in entries):
            raise Overloaded("the model is still loading", code="loading")

    def check_open(self) -> None:
        """Raises Overloaded once the server is told to stop."""
        if self.draining:
            raise Overloaded("the server is shutting down", code="shutting_down")

    def adapter_client(self, adapter: str) -> EngineClient:
        """The engine that has an adapter. Raises InvalidValue if none has."""
        for entry in self:
            if adapter in entry.client.adapters:
                return entry.client
        raise InvalidValue(f"no adapter {adapter[:64]!r}", "lora_name")

    def models(self) -> list[tuple[ServedModel, str | None]]:
        """Every loaded model, and every adapter with the name of its model."""
        found: list[tuple[ServedModel, str | None]] = []
        for entry in self:
            if (model := entry.model) is not None:
                found.append((model, None))
                found += [(self.get(name), model.name) for name in entry.client.adapters]
        return found

    @property
    def ready(self) -> bool:
        """True while every model can take requests."""
        entries = list(self)
        return bool(entries) and not self.draining and all(e.state == "ready" for e in entries)

    def _names(self) -> str:
        names = [repr(e.name) for e in self]
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        return ", ".join(names[:LISTED]) + more

    async def close(self) -> None:
        """Ends every request with an error and frees every model."""
        for entry in self:
            await entry.client.close()
