"""What computes tokens, as everything above it sees that."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from octavo.client.cached_prompts import CachedPrompts
from octavo.engine.events import TokenEvent
from octavo.engine.request import Request


class Overseer(Protocol):
    """Who has several engines, and is told what becomes of each."""

    def changed(self, client: EngineClient) -> None:
        """An engine is ready, or has ended."""
        ...

    def told(self, client: EngineClient, stored: list[int], removed: list[int]) -> None:
        """Blocks have come to an engine's prefix cache, and gone from it."""
        ...


class EngineClient(Protocol):
    """An engine in this process, in another, or several of them: callers cannot tell."""

    @property
    def ready(self) -> bool:
        """True while requests can be computed."""
        ...

    @property
    def adapters(self) -> list[str]:
        """Names of the LoRA adapters that requests may ask for."""
        ...

    @property
    def stats(self) -> Mapping[str, int]:
        """The latest fields of EngineStats (none while there is no engine), and `restarts`."""
        ...

    @property
    def pid(self) -> int | None:
        """The process that computes; None while there is none on this host."""
        ...

    @property
    def caches(self) -> Sequence[CachedPrompts]:
        """What is in the prefix caches of its engines, of those that tell."""
        ...

    def submit(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """The events of a request until its last; closing the iterator aborts it.

        A request that fails later ends with Ended. Raises RequestError for one that is refused,
        Overloaded if it cannot be taken now, EngineFailed if the engine is lost.
        """
        ...

    async def load_adapter(self, name: str, path: str) -> None:
        """Makes a LoRA adapter (a PEFT folder) usable by name. Raises RequestError."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Keeps an adapter from new requests; running ones keep it. Raises RequestError."""
        ...

    async def close(self) -> None:
        """Ends every request with an error and frees the model. May be called again."""
        ...
