"""Loading and unloading LoRA adapters while serving, under vLLM's routes, from one folder only."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidValue, RequestError
from octavo.server.bodies import Bodies
from octavo.server.guard import require_admin
from octavo.server.http import json_response
from octavo.server.models import leased
from octavo.server.parsing import Body, Fields
from octavo.server.registry import Registry

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
encode = msgspec.json.Encoder().encode


class LoadAdapterBody(msgspec.Struct, kw_only=True):
    """model: whose adapter it is; may be left out where one model is served."""

    lora_name: str
    lora_path: str
    model: str | None = None


class UnloadAdapterBody(msgspec.Struct, kw_only=True):
    lora_name: str


class AdapterRoutes:
    """The handlers of /v1/load_lora_adapter and /v1/unload_lora_adapter.

    folder: where adapters may be loaded from; None: nowhere.
    """

    def __init__(self, registry: Registry, bodies: Bodies, folder: Path | None) -> None:
        self._registry = registry
        self._bodies = bodies
        self._folder = folder

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        """The body of an admin's request. Raises RequestError."""
        require_admin(request.scope)
        if self._folder is None:
            raise RequestError(
                "adapters cannot be changed while serving: start the server with --lora-dir",
                "lora_name", "unsupported_parameter",
            )  # fmt: skip
        self._registry.check_loaded()
        return await self._bodies.read(request, kind, Fields(), self._registry.bounds)

    def _resolve(self, name: str) -> Path:
        """A folder below --lora-dir. Raises InvalidValue for any other path."""
        assert self._folder is not None
        root = self._folder.resolve()
        try:
            path = (root / name).resolve()
            found = path.is_dir()
        except (OSError, ValueError):  # a name that no file can have
            found = False
        if not found or path == root or not path.is_relative_to(root):
            raise InvalidValue(
                f"lora_path {name[:64]!r} is no folder in the server's --lora-dir", "lora_path"
            )
        return path

    async def load(self, request: Request) -> Response:
        body = await self._body(request, LoadAdapterBody)
        if not NAME.fullmatch(body.lora_name) or self._registry.taken(body.lora_name):
            raise InvalidValue(
                "lora_name has 1 to 64 letters, digits, '_', '.' and '-', and is no model's name",
                "lora_name",
            )
        lease = await leased(request, self._registry, body.model)
        path = str(self._resolve(body.lora_path))
        await lease.model.client.load_adapter(body.lora_name, path)
        return json_response(encode({"status": "loaded", "model": body.lora_name}))

    async def unload(self, request: Request) -> Response:
        body = await self._body(request, UnloadAdapterBody)
        client = self._registry.adapter_client(body.lora_name)
        await client.unload_adapter(body.lora_name)
        return json_response(encode({"status": "unloaded", "model": body.lora_name}))
