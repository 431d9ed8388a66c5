"""The LoRA adapters that an engine is to have, whichever engine that is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from octavo.checkpoint.identity import FileState, file_states
from octavo.client.link import EngineLink
from octavo.client.protocol import Adapted, LoadAdapter, UnloadAdapter
from octavo.client.replay import SUSPECT, Stream
from octavo.errors import EngineFailed, RequestError

FILES = ("adapter_config.json", "adapter_model.safetensors")
SECONDS = 60.0  # for an adapter to load


@dataclass
class Adapter:
    """path: a PEFT folder; files: its state when the adapter was loaded first."""

    path: str
    files: dict[str, FileState]
    users: int = 0  # requests in flight
    leaving: bool = False  # to be unloaded when the last of them has ended
    doubt: int = 0  # engines that died while they loaded it again

    @classmethod
    def at(cls, path: str) -> Adapter:
        return cls(path, file_states(Path(path) / name for name in FILES))


class AdapterTable:
    """Adapters by name, with the requests that use them."""

    def __init__(self) -> None:
        self.adapters: dict[str, Adapter] = {}
        self._restoring = ""  # the one that a new engine is loading
        self._used: dict[Stream, Adapter] = {}  # by requests; another may have its name by now
        self._asked: dict[int, asyncio.Future[Adapted]] = {}  # of the present engine, by serial
        self._serials = count()

    @property
    def names(self) -> list[str]:
        """Of those that new requests may name."""
        return [name for name, a in self.adapters.items() if not a.leaving]

    def check_free(self, name: str) -> None:
        """Raises RequestError for the name of an adapter that is still there."""
        if known := self.adapters.get(name):
            state = "still in use by requests" if known.leaving else "loaded already"
            raise RequestError(f"adapter {name[:64]!r} is {state}", "lora_name", "invalid_value")

    async def load(self, link: EngineLink, name: str, adapter: Adapter) -> None:
        """Has an engine load an adapter, which it unloads again if nobody waits for the answer.
        Raises RequestError with what it says, and EngineFailed when it ends or says nothing."""
        serial = next(self._serials)
        answer = self._asked[serial] = asyncio.get_running_loop().create_future()
        link.send(LoadAdapter(serial, name, adapter.path, adapter.files))
        try:
            async with asyncio.timeout(SECONDS):
                said = await answer
        except (TimeoutError, asyncio.CancelledError) as e:
            link.send(UnloadAdapter(name))  # once it has done it
            if isinstance(e, asyncio.CancelledError):
                raise
            raise EngineFailed("the engine did not answer", code="engine_failed") from None
        finally:
            self._asked.pop(serial, None)
        if said.message:
            kind = EngineFailed if said.code == "engine_failed" else RequestError
            raise kind(said.message, said.param, said.code)

    async def restore(self, link: EngineLink, lose: Callable[[str, str], None]) -> None:
        """Has a new engine load all, but those that leave meanwhile. lose: is told of those that it
        cannot load, and why. Raises EngineFailed when it ends."""
        loaded: dict[str, Adapter] = {}
        for name, adapter in list(self.adapters.items()):
            if self.adapters.get(name) is not adapter:
                continue
            self._restoring = name
            try:
                await self.load(link, name, adapter)
                loaded[name] = adapter
            except RequestError as e:
                if link.over:
                    raise
                lose(name, str(e))
        self._restoring = ""
        for name, adapter in loaded.items():
            if self.adapters.get(name) is not adapter:
                link.send(UnloadAdapter(name))

    def answered(self, message: Adapted) -> None:
        """What an engine has said."""
        answer = self._asked.get(message.serial)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def engine_ended(self) -> None:
        """Nobody is going to answer."""
        for serial in self._asked:
            said = "the engine ended while it loaded the adapter"
            self.answered(Adapted(serial, said, "lora_path", "engine_failed"))

    def died(self, doubt: int) -> str:
        """The engine is gone, which says so much against the adapter that it was loading again.
        Gives the name of one that engines die of, or ""."""
        name, self._restoring = self._restoring, ""
        if (adapter := self.adapters.get(name)) is None:
            return ""
        adapter.doubt += doubt
        return name if adapter.doubt >= SUSPECT else ""

    def acquire(self, stream: Stream) -> None:
        """Counts a request. Raises RequestError if there is no such adapter."""
        if not (name := stream.request.adapter):
            return
        if name not in self.names:
            raise RequestError(f"no adapter {name[:64]!r}", "adapter", "model_not_found")
        self._used[stream] = self.adapters[name]
        self.adapters[name].users += 1

    def release(self, stream: Stream) -> bool:
        """Counts the end of a request; whether its adapter is to be unloaded now."""
        if (adapter := self._used.pop(stream, None)) is None:
            return False
        adapter.users -= 1
        return self._gone(stream.request.adapter)

    def leave(self, name: str) -> bool:
        """Keeps an adapter from new requests; whether it is to be unloaded now. Raises
        RequestError if there is none."""
        if name not in self.names:
            raise RequestError(f"no adapter {name[:64]!r}", "lora_name", "invalid_value")
        self.adapters[name].leaving = True
        return self._gone(name)

    def _gone(self, name: str) -> bool:
        adapter = self.adapters.get(name)
        if adapter is None or adapter.users or not adapter.leaving:
            return False
        del self.adapters[name]
        return True
