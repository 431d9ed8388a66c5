"""Handlers of /v1/batches: many requests in a file, answered while there is time."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidValue, Overloaded, RequestError
from octavo.server import replies
from octavo.server.background import to_its_end
from octavo.server.batch import (
    AT_ONCE,
    Fault,
    Line,
    ShuttingDown,
    encode,
    finished_ids,
    read_lines,
    run_lines,
)
from octavo.server.bodies import Bodies
from octavo.server.endpoint import Endpoint, Handler
from octavo.server.exchanges import described
from octavo.server.files import FORM, QUERY, Files
from octavo.server.guard import Principal, principal
from octavo.server.http import json_response
from octavo.server.loopback import Loopback
from octavo.server.paging import asked, page
from octavo.server.parsing import Fields
from octavo.server.runner import answering
from octavo.server.sizes import AtMost, SizeBounds
from octavo.server.store import Object, Store

LOG = logging.getLogger("octavo.server")
DAY = 86_400
MOST_BATCHES = 256  # that are worked on
MOST_FAULTS = 100  # that a batch tells of
EVERY = 0.5  # seconds between two records of the progress
UNFINISHED = ("validating", "in_progress")


class BatchBody(msgspec.Struct, kw_only=True):
    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str] | None, AtMost(64 << 10)] = None


class Batches:
    """Batches of the store, which go on after a restart.

    loopback: answers lines; endpoints: those that may be asked; sender: who an owner is. The
    application sets them.
    """

    loopback: Loopback
    sender: Callable[[str], Principal]
    endpoints: frozenset[str]

    def __init__(self, store: Store) -> None:
        self._store, self.files = store, Files(store)
        self._folder = store.folder / "batches"
        self._folder.mkdir(exist_ok=True)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)  # others shall find room beside batches

    def resume(self) -> None:
        """Goes on with what an earlier server left."""
        for owner, batch in self._store.unfinished_batches():
            self._start(owner, batch)

    async def close(self) -> None:
        """Stops; what is left is done by the next server."""
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    # -- handlers -----------------------------------------------------------------------------

    def table(self, bodies: Bodies) -> list[Endpoint]:
        """The endpoints of batches and files."""
        files = self.files

        async def create(request: Request) -> Response:
            return await self._create(request, bodies)

        entries: list[tuple[str, str, Handler, Any]] = [
            ("/v1/batches/{id}", "GET", self._get, replies.Batch),
            ("/v1/batches/{id}/cancel", "POST", self._cancel, replies.Batch),
            ("/v1/files/{id}", "GET", files.get, replies.File),
            ("/v1/files/{id}", "DELETE", files.delete, replies.Deleted),
        ]  # fmt: skip
        binary, content = "application/octet-stream", answering(files.content)
        return [
            Endpoint("/v1/batches", "POST", answering(create), BatchBody, answer=replies.Batch),
            Endpoint(
                "/v1/batches", "GET", answering(self._list), answer=replies.Batches, query=asked()
            ),
            Endpoint("/v1/files", "POST", answering(files.upload), answer=replies.File, form=FORM),
            Endpoint("/v1/files", "GET", answering(files.list), answer=replies.Files, query=QUERY),
            Endpoint("/v1/files/{id}/content", "GET", content, media=binary, answer=str),
            *(Endpoint(path, m, answering(made), answer=kind) for path, m, made, kind in entries),
        ]

    async def _create(self, request: Request, bodies: Bodies) -> Response:
        body = await bodies.read(request, BatchBody, Fields(), lambda _: SizeBounds(0, 0))
        owner = principal(request.scope).salt
        if len(self._running) >= MOST_BATCHES:
            raise Overloaded(f"{MOST_BATCHES} batches are worked on", code="overloaded")
        if body.endpoint not in self.endpoints:
            known = ", ".join(sorted(self.endpoints))
            raise InvalidValue(f"endpoint is one of {known}", "endpoint")
        try:
            await asyncio.to_thread(self.files.find, owner, body.input_file_id)
        except RequestError as e:
            raise InvalidValue(f"input_file_id: {e}", "input_file_id") from None
        now = int(time.time())
        batch: Object = {
            "id": "batch_" + secrets.token_hex(12), "object": "batch", "status": "validating",
            "endpoint": body.endpoint, "input_file_id": body.input_file_id,
            "completion_window": body.completion_window, "created_at": now, "errors": None,
            "expires_at": now + DAY, "output_file_id": None, "error_file_id": None,
            "in_progress_at": None, "finalizing_at": None, "completed_at": None,
            "failed_at": None, "expired_at": None, "cancelling_at": None, "cancelled_at": None,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": body.metadata or {},
        }  # fmt: skip
        await asyncio.to_thread(self._store.put_object, owner, batch)
        self._start(owner, batch)
        return json_response(encode(batch))

    async def _find(self, request: Request) -> Object:
        owner, id = principal(request.scope).salt, request.path_params["id"]
        return await asyncio.to_thread(self._store.get_object, owner, "batch", id)

    async def _get(self, request: Request) -> Response:
        return json_response(encode(await self._find(request)))

    async def _list(self, request: Request) -> Response:
        owner = principal(request.scope).salt
        listed = await asyncio.to_thread(self._store.objects, owner, "batch")
        return json_response(encode(page(listed, request.query_params)))

    async def _cancel(self, request: Request) -> Response:
        """Ends a batch; what is done is kept in its files."""
        batch = await self._find(request)
        if (task := self._running.pop(batch["id"], None)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            batch = await self._find(request)
            if batch["status"] in UNFINISHED:
                batch["cancelling_at"] = int(time.time())
                owner = principal(request.scope).salt
                await asyncio.to_thread(self._close, owner, batch, "cancelled")
        return json_response(encode(batch))

    # -- work ---------------------------------------------------------------------------------

    def _start(self, owner: str, batch: Object) -> None:
        task = asyncio.create_task(self._work(owner, batch))
        self._running[batch["id"]] = task
        task.add_done_callback(lambda _: self._running.pop(batch["id"], None))

    def _results(self, batch: Object) -> tuple[Path, Path]:
        """Where answers and errors are written until the end."""
        return tuple(self._folder / f"{batch['id']}.{kind}" for kind in ("output", "error"))  # type: ignore[return-value]

    async def _work(self, owner: str, batch: Object) -> None:
        """Runs a batch. One that cannot go on has failed, with what is done."""
        try:
            await self._run(owner, batch)
        except Exception as e:
            LOG.error("a batch has failed: %s", described(e))
            _tell(batch, [Fault(0, "the server could not go on with it")], "internal_error")
            await to_its_end(asyncio.to_thread(self._close, owner, batch, "failed"))

    async def _save(self, owner: str, batch: Object) -> None:
        await to_its_end(asyncio.to_thread(self._store.put_object, owner, batch))

    async def _record(self, owner: str, batch: Object) -> None:
        """Keeps the progress of a batch, for ever."""
        while True:
            await asyncio.sleep(EVERY)
            await self._save(owner, batch)

    async def _run(self, owner: str, batch: Object) -> None:
        source = self.files.path(batch["input_file_id"])
        if not (total := await self._validated(owner, batch, source)):
            return
        done = [await asyncio.to_thread(finished_ids, path) for path in self._results(batch)]
        counts = batch["request_counts"]
        counts |= {"total": total, "completed": len(done[0]), "failed": len(done[1])}
        batch |= {"status": "in_progress", "in_progress_at": int(time.time())}
        await self._save(owner, batch)
        known = done[0] | done[1]
        files: tuple[BinaryIO, ...] = tuple(path.open("ab") for path in self._results(batch))
        recording = asyncio.create_task(self._record(owner, batch))

        def write(line: bytes, good: bool) -> None:
            file = files[0 if good else 1]
            file.write(line)
            file.flush()
            counts["completed" if good else "failed"] += 1

        async def ask(path: str, body: bytes) -> tuple[int, bytes]:
            async with self._slots:
                return await self.loopback.whole(path, body, self.sender(owner))

        lines = (line for line in read_lines(source, [batch["endpoint"]]) if isinstance(line, Line))
        left = (line for line in lines if line.custom_id not in known)
        try:
            await run_lines(left, ask, write)
        except ShuttingDown:
            return
        finally:
            recording.cancel()
            await asyncio.gather(recording, return_exceptions=True)
            for file in files:
                file.close()
        await to_its_end(asyncio.to_thread(self._close, owner, batch, "completed"))

    async def _validated(self, owner: str, batch: Object, source: Path) -> int:
        """The number of requests; 0 for a batch that has failed since it is no batch."""

        def check() -> tuple[int, list[Fault]]:
            if not source.exists():
                return 0, [Fault(0, "the input file is gone")]
            total, faults = 0, list[Fault]()
            for line in read_lines(source, [batch["endpoint"]]):
                total += 1
                if isinstance(line, Fault):
                    faults.append(line)
            return total, faults if total else [Fault(0, "the input file is empty")]

        total, faults = await asyncio.to_thread(check)
        if not faults:
            return total
        _tell(batch, faults)
        await to_its_end(asyncio.to_thread(self._close, owner, batch, "failed"))
        return 0

    def _close(self, owner: str, batch: Object, status: str) -> None:
        """Makes files of the results, and keeps the batch as it has ended."""
        names = ("output_file_id", "error_file_id")
        for name, path in zip(names, self._results(batch), strict=True):
            if path.exists() and path.stat().st_size:
                made = self.files.add(owner, path, f"{path.name}.jsonl", "batch_output")
                batch[name] = made["id"]
            path.unlink(missing_ok=True)
        batch |= {"status": status, "finalizing_at": int(time.time())}
        batch[f"{status}_at"] = int(time.time())
        self._store.put_object(owner, batch)


def _tell(batch: Object, faults: list[Fault], code: str = "invalid_value") -> None:
    """Says in a batch what is wrong with it."""
    told = [
        {"code": code, "line": f.line, "message": f.message, "param": None}
        for f in faults[:MOST_FAULTS]
    ]
    batch["errors"] = {"object": "list", "data": told}
