"""The engine's own process: reads requests from a socket, computes steps, writes token events.

Run as `python -m octavo.client.engine_process FD`. Ends when the socket does, and the kernel ends
it if the front dies first.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path

import msgspec

from octavo.backends.base import Adapters, Executable
from octavo.checkpoint.identity import check_unchanged
from octavo.client.protocol import (
    RECEIVE,
    Abort,
    Adapted,
    Events,
    Failed,
    FrameBuffer,
    LoadAdapter,
    Loading,
    Profiled,
    Ready,
    Refused,
    Start,
    StartProfile,
    TakeProfile,
    ToEngine,
    ToFront,
    UnloadAdapter,
    Vocabulary,
    Working,
    event_frames,
    frame,
)
from octavo.engine.block_changes import BlockChanges
from octavo.engine.call_timer import Call
from octavo.engine.constraint import TokenTable
from octavo.engine.engine import Engine
from octavo.engine.events import TokenEvent
from octavo.engine.loader import load_executable, make_engine
from octavo.engine.open import OpenModel, open_model
from octavo.engine.plan import Plan
from octavo.engine.profiler import EngineProfiler
from octavo.engine.request import Request
from octavo.errors import ModelChanged, ModelNotFound, OctavoError, RequestError, place
from octavo.process import die_with_parent

LOG = logging.getLogger(__name__)
BEAT = 1.0  # seconds


class EngineProcess:
    """Serves one front over one socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._frames: FrameBuffer[ToEngine] = FrameBuffer(ToEngine)
        self._loaded: tuple[OpenModel, Executable, Plan] | None = None
        self._engine: Engine | None = None
        self._changes = BlockChanges()
        self._profiled: tuple[Executable, Plan] | None = None  # of the engine
        self._profiler: EngineProfiler | None = None  # while it runs
        self._heart: threading.Thread | None = None
        self._over = threading.Event()

    def receive(self, wait: bool) -> list[ToEngine]:
        """Messages that have arrived; blocks for one if `wait`. Raises EOFError at the end."""
        poll = select.poll()  # which takes any descriptor, where select takes those below 1024
        poll.register(self._sock, select.POLLIN)
        if not poll.poll(None if wait else 0):
            return []
        data = self._sock.recv(RECEIVE)
        if not data:
            raise EOFError
        self._frames.push(data)
        return list(iter(self._frames.pop, None))

    def send(self, message: ToFront) -> None:
        self._write(frame(message))

    def _write(self, data: bytes) -> None:
        with self._sending:
            self._sock.sendall(data)

    def load(self, message: Start | Vocabulary) -> None:
        """Does a part of what has to be done to be ready, or ends with what is wrong."""
        try:
            if isinstance(message, Start):
                self.start(message)
            else:
                self.finish(message.table)
        except OctavoError as e:
            self.send(Failed(type(e).__name__, str(e), list(e.suggestions)))
            raise SystemExit(e.exit_code) from None

    def start(self, message: Start) -> None:
        """Loads the model. Raises OctavoError."""
        plan = message.plan
        model = open_model(
            Path(message.path),
            plan.adapters > 0,
            plan.context,
            message.mmproj,
            plan.vision_dtype,
            plan.device,
        )
        check_unchanged(message.files)
        executable = load_executable(model, plan, lambda n: self.send(Loading(n)))
        check_unchanged(message.files)  # what was read while it was being written
        self._loaded = model, executable, plan

    def finish(self, table: TokenTable) -> None:
        """Makes an engine of what has been loaded. Raises OctavoError."""
        assert self._loaded is not None
        model, executable, plan = self._loaded
        self._engine = make_engine(model, executable, plan, table)
        self._engine.index.changes = self._changes
        self._loaded, self._profiled = None, (executable, plan)
        del model
        gc.collect()
        gc.freeze()  # what is loaded stays; collections look at requests only
        self._heart = threading.Thread(target=self._beat, args=(executable,), daemon=True)
        self._heart.start()
        self.send(Ready(os.getpid(), executable.kernels))

    def _beat(self, executable: Executable) -> None:
        """Tells the front that work goes on, whatever the step that is being computed does."""
        assert self._engine is not None
        with contextlib.suppress(OSError):  # the front is gone, as the other thread will see
            while not self._over.wait(BEAT):
                if self._engine.has_work:
                    self.send(Working(executable.operations))

    def handle(self, message: ToEngine) -> None:
        if isinstance(message, Start | Vocabulary):
            return self.load(message)
        assert self._engine is not None
        if isinstance(message, Abort):
            self._engine.abort(message.id)
        elif isinstance(message, LoadAdapter):
            self.send(self.load_adapter(message))
        elif isinstance(message, UnloadAdapter):
            self.unload_adapter(message.name)
        elif isinstance(message, StartProfile):
            self.start_profile()
        elif isinstance(message, TakeProfile):
            self.take_profile()
        elif refused := self.submit(message.request):
            self.send(refused)

    def submit(self, request: Request) -> Refused | None:
        """Queues a request, or says why not."""
        assert self._engine is not None
        try:
            self._engine.add(request)
        except RequestError as e:
            return Refused(request.id, str(e), e.param, e.code)
        except Exception as e:
            LOG.error("a request could not be queued: %s", place(e))
            return Refused(request.id, "the engine cannot take this request", None, "engine_error")
        return None

    def load_adapter(self, message: LoadAdapter) -> Adapted:
        """Loads an adapter, and says how that went."""
        assert self._engine is not None
        try:
            self._load(self._engine.adapters, message)
        except RequestError as e:
            return Adapted(message.serial, str(e), e.param, e.code)
        except Exception as e:
            LOG.error("an adapter could not be loaded: %s", place(e))
            reason = f"the adapter cannot be read ({type(e).__name__})"
            return Adapted(message.serial, reason, "lora_path", "invalid_adapter")
        return Adapted(message.serial)

    def _load(self, adapters: Adapters | None, message: LoadAdapter) -> None:
        if adapters is None:
            raise RequestError("this server was started without adapters", "lora_name")
        adapters.load(message.name, Path(message.path))
        try:
            check_unchanged(message.files)
        except (ModelChanged, ModelNotFound) as e:
            adapters.unload(message.name)
            raise RequestError(str(e), "lora_path", "invalid_adapter") from None

    def unload_adapter(self, name: str) -> None:
        """Unloads an adapter; its name is no request's, so there is nobody to tell of a failure."""
        assert self._engine is not None and self._engine.adapters is not None
        try:
            self._engine.adapters.unload(name)
        except Exception as e:
            LOG.error("an adapter could not be unloaded: %s", place(e))

    def start_profile(self) -> None:
        """Profiles from now on."""
        assert self._engine is not None and self._profiled is not None
        calls: list[Call] = [
            (self, "receive", lambda wait: "wait for messages" if wait else "receive"),
            (self, "handle", "handle message"),
            (self, "report", "report"),
            (self, "_tell", "tell"),
            (self, "_write", "send"),
        ]
        self._profiler = EngineProfiler(self._engine, *self._profiled, calls)

    def take_profile(self) -> None:
        """Ends profiling, and sends what there is."""
        assert self._profiler is not None
        profile, self._profiler = self._profiler.stop(), None
        self.send(Profiled(profile))

    def report(self) -> None:
        """One step, and what it gave."""
        assert self._engine is not None
        self._tell(self._engine, self._engine.step() if self._engine.has_work else [])

    def _tell(self, engine: Engine, events: list[TokenEvent]) -> None:
        """Tells the front what a step gave, and the engine's counts."""
        made = Events(events, msgspec.structs.asdict(engine.stats()), *self._changes.take())
        for data in event_frames(made):
            self._write(data)

    def run(self) -> None:
        """Serves until the front is gone."""
        try:
            with contextlib.suppress(EOFError, ConnectionError):
                self._serve()
        finally:
            self._over.set()
            if self._heart is not None:
                self._heart.join()

    def _serve(self) -> None:
        settled = True
        while True:
            busy = self._engine is not None and self._engine.has_work
            messages = self.receive(wait=not busy and settled)
            for message in messages:
                self.handle(message)
            if self._engine is None:
                continue
            if messages or busy:
                self.report()
            preparing = not self._engine.has_work and self._engine.pack_pending()
            if preparing:
                self._tell(self._engine, [])
            settled = not (self._engine.has_work or preparing)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the front's business
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent(int(sys.argv[2]))
    EngineProcess(socket.socket(fileno=int(sys.argv[1]))).run()
    os._exit(0)  # the system takes everything back at once; Python would go through it all first


if __name__ == "__main__":
    main()
