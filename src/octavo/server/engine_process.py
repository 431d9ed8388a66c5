"""The engine's own process: reads requests from a socket, computes steps, writes token events.

Run as `python -m octavo.server.engine_process FD`. Ends when the socket does, and the kernel ends
it if the front dies first.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from octavo.backends.base import Limits
from octavo.engine.engine import Engine
from octavo.engine.loader import load_executable, make_engine, open_model
from octavo.engine.plan import Plan
from octavo.errors import OctavoError, RequestError
from octavo.server.protocol import (
    Abort,
    Adapted,
    Events,
    Failed,
    FrameBuffer,
    LoadAdapter,
    Loading,
    Ready,
    Refused,
    Start,
    Submit,
    ToEngine,
    UnloadAdapter,
    send,
)

PR_SET_PDEATHSIG = 1
RECEIVE = 1 << 20


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when its parent ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


def plan_fields(plan: Plan) -> dict[str, Any]:
    """A plan as plain values, for the wire."""
    fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan) if f.name != "limits"}
    return fields | {f"limits.{k}": v for k, v in dataclasses.asdict(plan.limits).items()}


def plan_from(fields: dict[str, Any]) -> Plan:
    limits = Limits(**{k[7:]: v for k, v in fields.items() if k.startswith("limits.")})
    plain = {k: v for k, v in fields.items() if not k.startswith("limits.")}
    return Plan(**plain, limits=limits)


class EngineProcess:
    """Serves one front over one socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._frames = FrameBuffer()
        self._engine: Engine | None = None

    def receive(self, wait: bool) -> list[ToEngine]:
        """Messages that have arrived; blocks for one if `wait`. Raises EOFError at the end."""
        ready, _, _ = select.select([self._sock], [], [], None if wait else 0)
        if not ready:
            return []
        data = self._sock.recv(RECEIVE)
        if not data:
            raise EOFError
        return self._frames.push(data)

    def start(self, message: Start) -> None:
        try:
            plan = plan_from(message.memory)
            model = open_model(Path(message.path), plan.adapters > 0, plan.context)
            executable = load_executable(model, plan, lambda n: send(self._sock, Loading(n)))
            self._engine = make_engine(model, executable, plan, message.table)
        except OctavoError as e:
            send(self._sock, Failed(type(e).__name__, str(e), list(e.suggestions)))
            raise SystemExit(e.exit_code) from None
        del model
        gc.collect()
        gc.freeze()  # what is loaded stays; collections look at requests only
        send(self._sock, Ready(os.getpid(), executable.model.isa))

    def handle(self, message: ToEngine) -> None:
        if isinstance(message, Start):
            return self.start(message)
        assert self._engine is not None
        if isinstance(message, Abort):
            self._engine.abort(message.id)
        elif isinstance(message, LoadAdapter | UnloadAdapter):
            send(self._sock, self.adapt(message))
        elif isinstance(message, Submit):
            try:
                self._engine.add(message.request)
            except RequestError as e:
                send(self._sock, Refused(message.request.id, str(e), e.param, e.code))

    def adapt(self, message: LoadAdapter | UnloadAdapter) -> Adapted:
        """Loads or unloads an adapter, and says how that went."""
        assert self._engine is not None
        try:
            if self._engine.adapters is None:
                raise RequestError("this server was started without adapters", "lora_name")
            if isinstance(message, LoadAdapter):
                self._engine.adapters.load(message.name, Path(message.path))
            else:
                self._engine.adapters.unload(message.name)
        except RequestError as e:
            return Adapted(message.name, str(e), e.param, e.code)
        return Adapted(message.name)

    def report(self) -> None:
        """One step and one frame."""
        assert self._engine is not None
        events = self._engine.step() if self._engine.has_work else []
        send(self._sock, Events(events, dataclasses.asdict(self._engine.stats())))

    def run(self) -> None:
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
            settled = not (self._engine.has_work or self._engine.settle())


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the front's business
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent(int(sys.argv[2]))
    try:
        # A copy has the lowest free number; the front's may be above what select takes.
        EngineProcess(socket.socket(fileno=int(sys.argv[1])).dup()).run()
    except (EOFError, ConnectionError):
        pass  # the front is gone


if __name__ == "__main__":
    main()
