"""Handlers of /v1/files: the inputs and results of batches."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from pathlib import Path

import msgspec
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response

from octavo.errors import InvalidValue
from octavo.server.bodies import TooLarge
from octavo.server.exchange import exchange
from octavo.server.guard import principal
from octavo.server.http import ClientGone, json_response
from octavo.server.paging import asked, page
from octavo.server.store import NotStored, Object, Store

MAX_FILE = 256 << 20
MOST_BYTES = 4 << 30  # of all files of one owner
LEAST = 4096  # bytes that a file counts
MAX_NAME = 256
MOST_LISTED = 10_000
encode = msgspec.json.Encoder().encode
FORM = {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}}
QUERY = asked(MOST_LISTED, purpose={"type": "string"})


class Files:
    """Files of the store's folder, each described by an object."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._folder = store.folder / "files"
        self._folder.mkdir(exist_ok=True)

    def path(self, id: str) -> Path:
        return self._folder / id

    def add(self, owner: str, source: Path, name: str, purpose: str) -> Object:
        """Takes over a file and describes it."""
        id = "file-" + secrets.token_hex(12)
        size = source.stat().st_size
        source.replace(self.path(id))
        made: Object = {
            "id": id, "object": "file", "bytes": size, "created_at": int(time.time()),
            "filename": name, "purpose": purpose, "status": "processed", "expires_at": None,
        }  # fmt: skip
        self._store.put_object(owner, made)
        return made

    async def upload(self, request: Request) -> Response:
        length = request.headers.get("content-length", "")
        if not length.isdigit() or int(length[:20]) > MAX_FILE:
            raise TooLarge(f"a file has a content-length of at most {MAX_FILE:,} bytes")
        exchange(request.scope).received = int(length)
        try:
            async with request.form(max_files=1, max_fields=4) as form:
                given, purpose = form.get("file"), form.get("purpose")
                if not isinstance(given, UploadFile):
                    raise InvalidValue("file is missing", "file")
                if purpose != "batch":
                    raise InvalidValue("purpose is batch", "purpose")
                for name in form:
                    if name not in ("file", "purpose"):
                        raise InvalidValue(f"{name[:64]} is not supported here", name[:64])
                made = await asyncio.to_thread(self._take, principal(request.scope).salt, given)
        except (HTTPException, MultiPartException):
            raise InvalidValue("the body is no multipart form") from None
        except ClientDisconnect:
            raise ClientGone from None
        return json_response(encode(made))

    def _take(self, owner: str, given: UploadFile) -> Object:
        have = sum(max(f["bytes"], LEAST) for f in self._store.objects(owner, "file"))
        if have + max(given.size or 0, LEAST) > MOST_BYTES:
            raise TooLarge(
                f"files of {have:,} bytes are here, {MOST_BYTES:,} may be: delete some first"
            )
        partial = self._folder / ("upload-" + secrets.token_hex(12))
        try:
            with partial.open("wb") as file:
                shutil.copyfileobj(given.file, file)
            return self.add(owner, partial, (given.filename or "file")[:MAX_NAME], "batch")
        finally:
            partial.unlink(missing_ok=True)

    def find(self, owner: str, id: str) -> Object:
        return self._store.get_object(owner, "file", id)

    async def _find(self, request: Request) -> Object:
        owner, id = principal(request.scope).salt, request.path_params["id"]
        return await asyncio.to_thread(self.find, owner, id)

    async def get(self, request: Request) -> Response:
        return json_response(encode(await self._find(request)))

    async def content(self, request: Request) -> Response:
        path = self.path((await self._find(request))["id"])
        if not await asyncio.to_thread(path.is_file):
            raise NotStored("the content of this file is gone", "id", "not_found")
        return FileResponse(path, media_type="application/octet-stream")

    async def delete(self, request: Request) -> Response:
        found = await self._find(request)
        await asyncio.to_thread(self._store.delete_object, found["id"])
        await asyncio.to_thread(self.path(found["id"]).unlink, missing_ok=True)
        return json_response(encode({"id": found["id"], "object": "file", "deleted": True}))

    async def list(self, request: Request) -> Response:
        owner = principal(request.scope).salt
        listed = await asyncio.to_thread(self._store.objects, owner, "file")
        if (purpose := request.query_params.get("purpose")) is not None:
            listed = [file for file in listed if file["purpose"] == purpose]
        return json_response(encode(page(listed, request.query_params, MOST_LISTED, MOST_LISTED)))
