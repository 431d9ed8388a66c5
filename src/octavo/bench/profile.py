"""Profiles a model while it answers one request, served as `octavo serve` serves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

import msgspec

from octavo.bench.kernels import HostLimits, measure_limits
from octavo.client.process import EngineProcessClient
from octavo.errors import UsageError
from octavo.generate.profile import Profiling
from octavo.generate.trace import TracedProcess, TraceFile, trace_file
from octavo.server.app import create_app
from octavo.server.guard import Access, Principal
from octavo.server.loopback import Loopback
from octavo.server.metrics import Metrics
from octavo.server.registry import Registry
from octavo.server.source import ModelSource

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOKENS = 64  # that continue a prompt
LOOKS = 3


def text_request(prompt: str) -> dict[str, Any]:
    """The request that continues a prompt."""
    return {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


def host_limits(engine: TracedProcess) -> HostLimits:
    """What the host can do at most, as an engine uses it: the best of some looks, for others may
    want its memory too."""
    looks = [measure_limits(engine.isa, engine.threads) for _ in range(LOOKS)]
    best = (max(values) for values in zip(*(astuple(look)[2:] for look in looks), strict=True))
    return HostLimits(engine.isa, engine.threads, *best)


async def profile_request(source: ModelSource, body: Mapping[str, Any]) -> TraceFile:
    """A trace of the second of two equal requests: the first loads what is loaded when it is used
    first. Raises OctavoError."""
    path = CHAT if "messages" in body else TEXT
    data = msgspec.json.encode(body)
    model = await source.load()
    models, loopback = Registry(), Loopback()
    models.add(model.name, model.client).model = model
    create_app(models, Metrics(models), Access(), lambda one: None, loopback=loopback)

    async def ask() -> None:
        status, answer = await loopback.whole(path, data, Principal())
        if status != 200:
            error = msgspec.json.decode(answer)["error"]
            raise UsageError(f"the request was refused: {error['message']}")

    try:
        await ask()
        assert isinstance(model.client, EngineProcessClient)
        return trace_file(await Profiling().record({"": model.client}, ask))
    finally:
        await source.unload(model)
