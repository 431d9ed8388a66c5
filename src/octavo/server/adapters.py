"""LoRA adapters while serving: loaded from one folder only, and unloaded, under vLLM's routes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.server.dialects.openai.responses import encode
from octavo.server.dialects.openai.schemas import Body
from octavo.server.guard import require_admin
from octavo.server.http import json_response

if TYPE_CHECKING:
    from octavo.server.app import Api

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class LoadBody(msgspec.Struct, kw_only=True):
    lora_name: str
    lora_path: str


class UnloadBody(msgspec.Struct, kw_only=True):
    lora_name: str


class AdapterRoutes:
    """The handlers of /v1/load_lora_adapter and /v1/unload_lora_adapter."""

    def __init__(self, api: Api, folder: Path | None) -> None:
        self._api = api
        self._folder = folder

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        """What to load or unload. Raises RequestError for those who may not."""
        require_admin(request.scope)
        if self._folder is None:
            raise RequestError(
                "adapters cannot be changed while serving: start the server with --lora-dir",
                "lora_name", "unsupported_parameter",
            )  # fmt: skip
        return await self._api.body(request, kind)

    def _resolve(self, name: str) -> Path:
        """A folder below the one that adapters are in, with no way out of it."""
        assert self._folder is not None
        root = self._folder.resolve()
        try:
            path = (root / name).resolve()
            found = path.is_dir()
        except (OSError, ValueError):  # a name that no file can have
            found = False
        if not found or path == root or not path.is_relative_to(root):
            raise RequestError(
                f"lora_path {name[:64]!r} is no folder in the server's --lora-dir", "lora_path",
                "invalid_value",
            )  # fmt: skip
        return path

    async def load(self, request: Request) -> Response:
        body = await self._body(request, LoadBody)
        served = self._api.model(None)
        taken = (served.name, *served.aliases, *self._api.client.adapters)
        if not NAME.fullmatch(body.lora_name) or body.lora_name in taken:
            raise RequestError(
                "lora_name has 1 to 64 letters, digits, '_', '.' and '-', and is no model's name",
                "lora_name", "invalid_value",
            )  # fmt: skip
        path = self._resolve(body.lora_path)
        await self._api.client.load_adapter(body.lora_name, str(path))
        return json_response(encode({"status": "loaded", "model": body.lora_name}))

    async def unload(self, request: Request) -> Response:
        body = await self._body(request, UnloadBody)
        if body.lora_name not in self._api.client.adapters:
            raise RequestError(f"no adapter {body.lora_name[:64]!r}", "lora_name", "invalid_value")
        await self._api.client.unload_adapter(body.lora_name)
        return json_response(encode({"status": "unloaded", "model": body.lora_name}))
