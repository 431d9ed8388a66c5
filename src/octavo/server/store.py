"""What a server keeps between requests: responses, files and batches, in an SQLite file."""

from __future__ import annotations

import fcntl
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from octavo.errors import InvalidValue, RequestError, UsageError

Object = dict[str, Any]  # of JSON
MOST_BYTES = 1 << 30  # of all responses; the oldest are forgotten
MOST_TURNS = 4096  # of one conversation
SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT, previous TEXT, created REAL, status TEXT,
    input BLOB, response BLOB
);
CREATE TABLE IF NOT EXISTS objects (
    id TEXT PRIMARY KEY, kind TEXT, owner TEXT, created INTEGER, status TEXT, body BLOB
);
CREATE INDEX IF NOT EXISTS by_age ON responses (created);
"""


class NotStored(RequestError):
    status = 404


@dataclass(frozen=True)
class StoredResponse:
    """A response as it is kept: its input items and itself, as JSON."""

    id: str
    status: str
    previous: str | None
    input: bytes
    response: bytes

    @staticmethod
    def decode(data: bytes) -> Any:
        return msgspec.json.decode(data)

    @property
    def fields(self) -> dict[str, Any]:
        return msgspec.json.decode(self.response)  # type: ignore[no-any-return]


class Store:
    """Responses by id. Each belongs to an owner, and nobody else finds it.

    folder: where they outlive the server, None for a folder that ends with it. All of it may be
    called from any thread. Raises UsageError for a folder that another server uses, or
    whose file is damaged.
    """

    def __init__(self, folder: Path | None = None, most: int = MOST_BYTES) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="octavo-") if folder is None else None
        self.folder = folder or Path(self._temporary.name)  # type: ignore[union-attr]
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._most = most
        self._lock = threading.Lock()
        self._held = (self.folder / "lock").open("w")
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._held.close()
            raise UsageError(f"another server keeps its data in {self.folder}") from None
        file = self.folder / "octavo.sqlite3"
        with ExitStack() as undo:
            undo.callback(self._held.close)
            try:
                self._db = sqlite3.connect(file, check_same_thread=False)
                undo.callback(self._db.close)
                with self._write() as db:
                    db.executescript(SCHEMA)
                self._total = self._db.execute(
                    "SELECT COALESCE(SUM(LENGTH(input) + LENGTH(response)), 0) FROM responses"
                ).fetchone()[0]
            except sqlite3.Error as e:
                raise UsageError(f"{file} cannot be used: {e}") from None
            undo.pop_all()

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._db:
            yield self._db

    def put(self, owner: str, one: StoredResponse) -> None:
        """Keeps a response, in place of one with its id."""
        size = len(one.input) + len(one.response)
        with self._write() as db:
            self._forget(db, "id = ?", (one.id,))
            if self._total + size > self._most:
                rows = db.execute("SELECT id FROM responses ORDER BY created").fetchall()
                for (oldest,) in rows:
                    if self._total + size <= self._most:
                        break
                    self._forget(db, "id = ?", (oldest,))
            db.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)",
                (one.id, owner, one.previous, time.time(), one.status, one.input, one.response),
            )
            self._total += size

    def _forget(self, db: sqlite3.Connection, where: str, values: tuple[str, ...]) -> int:
        rows = db.execute(
            f"DELETE FROM responses WHERE {where} RETURNING LENGTH(input) + LENGTH(response)",
            values,
        ).fetchall()
        self._total -= sum(size for (size,) in rows)
        return len(rows)

    def get(self, owner: str, id: str) -> StoredResponse:
        """A response. Raises NotStored."""
        with self._lock:
            row = self._db.execute(
                "SELECT id, status, previous, input, response FROM responses "
                "WHERE id = ? AND owner = ?", (id, owner),
            ).fetchone()  # fmt: skip
        if row is None:
            raise NotStored(f"no response {id[:64]!r} is stored", "id", "response_not_found")
        return StoredResponse(*row)

    def delete(self, owner: str, id: str) -> None:
        """Forgets a response. Raises NotStored."""
        with self._write() as db:
            if not self._forget(db, "id = ? AND owner = ?", (id, owner)):
                raise NotStored(f"no response {id[:64]!r} is stored", "id", "response_not_found")

    def turns(self, owner: str, last: str | None) -> list[StoredResponse]:
        """A response and all before it, the first first. Raises InvalidValue."""
        name, out = "previous_response_id", list[StoredResponse]()
        while last is not None:
            try:
                one = self.get(owner, last)
            except NotStored as e:
                raise InvalidValue(f"{name}: {e}", name) from None
            if one.status not in ("completed", "incomplete") or len(out) == MOST_TURNS:
                raise InvalidValue(f"{name}: the response {last[:64]!r} is {one.status}", name)
            out.append(one)
            last = one.previous
        return out[::-1]

    def unfinished(self) -> list[tuple[str, StoredResponse]]:
        """Responses with their owners that an earlier server did not finish."""
        with self._lock:
            rows = self._db.execute(
                "SELECT owner, id, status, previous, input, response FROM responses "
                "WHERE status IN ('queued', 'in_progress')"
            ).fetchall()
        return [(owner, StoredResponse(*rest)) for owner, *rest in rows]

    # -- objects ------------------------------------------------------------------------------

    def put_object(self, owner: str, value: Object) -> None:
        """Keeps an object (a file's or a batch's description), in the place of one with its id."""
        row = (
            value["id"], value["object"], owner, value["created_at"], value["status"],
            msgspec.json.encode(value),
        )  # fmt: skip
        with self._write() as db:
            db.execute(
                "INSERT INTO objects VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE "
                "SET status = excluded.status, body = excluded.body", row,
            )  # fmt: skip

    def get_object(self, owner: str, kind: str, id: str) -> Object:
        """An object. Raises NotStored."""
        for found in self._objects("owner = ? AND kind = ? AND id = ?", (owner, kind, id)):
            return found[1]
        raise NotStored(f"no {kind} {id[:64]!r} is stored", "id", "not_found")

    def objects(self, owner: str, kind: str) -> list[Object]:
        """All objects of a kind, the latest first."""
        return [value for _, value in self._objects("owner = ? AND kind = ?", (owner, kind))]

    def unfinished_batches(self) -> list[tuple[str, Object]]:
        """Batches with their owners that an earlier server did not finish."""
        states = "('validating', 'in_progress', 'finalizing', 'cancelling')"
        return self._objects(f"kind = ? AND status IN {states}", ("batch",))

    def _objects(self, where: str, values: tuple[str, ...]) -> list[tuple[str, Object]]:
        order = "ORDER BY created DESC, rowid DESC"
        with self._lock:
            rows = self._db.execute(
                f"SELECT owner, body FROM objects WHERE {where} {order}", values
            ).fetchall()
        return [(owner, msgspec.json.decode(body)) for owner, body in rows]

    def delete_object(self, id: str) -> None:
        with self._write() as db:
            db.execute("DELETE FROM objects WHERE id = ?", (id,))

    def close(self) -> None:
        self._db.close()
        self._held.close()
        if self._temporary is not None:
            self._temporary.cleanup()
