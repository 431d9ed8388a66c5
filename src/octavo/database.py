"""An SQLite file, or a PostgreSQL server by its URL: the same SQL for both.

Both know the types text, bytea, bigint and double precision: SQLite goes by parts of their names.
"""

from __future__ import annotations

import math
import os
import re
import socket
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from octavo.errors import OctavoError, UsageError

WAIT = 5  # seconds for another process to finish writing, and for a server to answer
LONGEST = 2 * WAIT  # seconds after which a transaction is broken off
AGAIN = 1.0  # seconds after which one that could not be connected to is tried again
AMBIGUOUS = frozenset("@/?#")  # in a name or a password: where does it end?
EXAMPLE = "postgresql://USER@HOST:5432/DATABASE"
POSTGRESQL = ("postgresql", "postgres")  # schemes of URLs
Row = tuple[Any, ...]


class DatabaseError(OctavoError):
    """The database cannot be used. Whoever has work for it keeps it and tries again."""


class Unreadable(DatabaseError):
    """What is kept was written by another version of Octavo, or was damaged."""

    def __init__(self, what: str, why: Exception) -> None:
        super().__init__(f"the database has {what} that this version of Octavo cannot read: {why}")


class Conflict(OctavoError):
    """Somebody else wrote it first."""


class DatabaseConnection(Protocol):
    def execute(self, sql: str, values: Sequence[Any] = ()) -> list[Row]: ...

    def many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None: ...


class Database(Protocol):
    """All of it may be called from any thread."""

    def transaction(self) -> Any:
        """A context with a connection: all that is done in it, or nothing. Raises DatabaseError,
        Conflict for a key that is there already."""
        ...

    def close(self) -> None: ...


class SQLite:
    """A file, which several processes may use at a time; None: memory, which ends with this one."""

    def __init__(self, path: Path | None, tables: Sequence[str]) -> None:
        self._path = path
        self._name = "memory" if path is None else path.name
        self._lock = threading.Lock()
        with ExitStack() as undo:
            try:
                if path is not None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.touch(0o600)
                self._db = sqlite3.connect(
                    path or ":memory:", timeout=WAIT, check_same_thread=False
                )
                undo.callback(self._db.close)
                self._db.isolation_level = None
                self._write_ahead()
                self._db.execute("pragma synchronous = normal")
                for table in tables:
                    self._db.execute(table)
                self._file = path and path.stat().st_ino
            except (sqlite3.Error, OSError) as e:
                raise DatabaseError(f"{path} cannot be used: {e}") from None
            undo.pop_all()

    def _write_ahead(self) -> None:
        """Of several that open a new file at once, SQLite refuses some without waiting."""
        until = time.monotonic() + WAIT
        while True:
            try:
                self._db.execute("pragma journal_mode = wal")
                return
            except sqlite3.OperationalError as e:
                if e.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
                time.sleep(0.01)

    def execute(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        return self._db.execute(sql, values).fetchall()

    def many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        self._db.executemany(sql, rows)

    @contextmanager
    def transaction(self) -> Iterator[DatabaseConnection]:
        with self._lock:
            try:
                if self._path is not None and self._path.stat().st_ino != self._file:
                    raise DatabaseError(f"{self._name} is not the file that was opened")
                self._db.execute("begin immediate")
                with self._db:
                    yield self
            except sqlite3.IntegrityError as e:
                raise Conflict(str(e)) from None
            except (sqlite3.Error, OSError) as e:
                raise DatabaseError(f"{self._name} cannot be used: {e}") from None

    def close(self) -> None:
        self._db.close()


class PostgreSQL:
    """A server. A connection that is lost is opened again by the next transaction. Nobody waits for
    one that hangs: statements and transactions are limited, and who cannot have the connection soon
    is refused."""

    def __init__(self, url: str, tables: Sequence[str]) -> None:
        try:
            import psycopg
        except ImportError:
            raise UsageError(
                "PostgreSQL needs a client", 'pip install "octavo[postgresql]"'
            ) from None
        try:  # what it says of such a URL would quote it
            psycopg.conninfo.conninfo_to_dict(url)
            sound = not set(url.partition("://")[2].rpartition("@")[0]) & AMBIGUOUS
        except psycopg.ProgrammingError:
            sound = False
        if not sound:
            raise UsageError(
                f"{place(url)} is no URL that PostgreSQL knows: in names and passwords"
                " @ / ? # % are written %40 %2F %3F %23 %25", EXAMPLE,
            )  # fmt: skip
        self._module, self._url, self._tables = psycopg, url, tables
        self._lock = threading.Lock()
        self._db: Any = None
        self._socket: socket.socket | None = None  # the connection's
        self._away = "", -math.inf  # why it could not be connected to, and until when it is not
        with self.transaction():
            pass

    def _open(self) -> None:
        """Connects. Raises psycopg's Error, OSError."""
        self.close()
        wrong = self._module.errors
        why, until = self._away
        if time.monotonic() < until:
            raise self._module.OperationalError(why)
        with ExitStack() as undo:
            try:
                db = self._module.connect(
                    self._url, connect_timeout=WAIT, tcp_user_timeout=1000 * WAIT, autocommit=True
                )
            except self._module.Error as e:
                self._away = str(e), time.monotonic() + AGAIN
                raise
            undo.callback(db.close)
            ours = socket.socket(fileno=os.dup(db.fileno()))
            undo.callback(ours.close)
            with _limited(ours):
                db.execute(f"set statement_timeout = '{WAIT}s'")
                for table in self._tables:
                    # Two may begin at the same time: the other has made it.
                    with suppress(
                        wrong.UniqueViolation, wrong.DuplicateObject, wrong.DuplicateTable
                    ):
                        db.execute(table)
            undo.pop_all()
        self._db, self._socket = db, ours

    def execute(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        done = self._db.execute(sql.replace("?", "%s"), values)
        return done.fetchall() if done.description else []

    def many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        with self._db.cursor() as cursor:
            cursor.executemany(sql.replace("?", "%s"), rows)

    @contextmanager
    def transaction(self) -> Iterator[DatabaseConnection]:
        if not self._lock.acquire(timeout=WAIT):
            raise self._unusable(f"others have waited for it for {WAIT} s")
        try:
            if self._db is None or self._db.closed:
                self._open()
            assert self._socket is not None
            with _limited(self._socket), self._db.transaction():
                yield self
        except self._module.errors.UniqueViolation as e:
            raise Conflict(str(e)) from None
        except (self._module.Error, OSError) as e:
            raise self._unusable(str(e)) from None
        finally:
            self._lock.release()

    def _unusable(self, why: str) -> DatabaseError:
        where = place(self._url)
        why = " ".join(why.split())
        return DatabaseError(f"{where} cannot be used: {why}", f"pg_isready -d {where}")

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
        if self._socket is not None:
            self._socket.close()


@contextmanager
def _limited(ours: socket.socket) -> Iterator[None]:
    """A context that breaks a connection off if it takes too long: the host of a server that is
    stopped goes on confirming what it gets. Raises OSError if the system has no thread for it."""

    def leave() -> None:
        with suppress(OSError):  # it has ended
            ours.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(LONGEST, leave)
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError as e:
        raise OSError(str(e)) from None
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def place(url: str) -> str:
    """A URL without names and passwords; no more than its scheme if they cannot be told apart."""
    scheme, _, rest = url.partition("://")
    who, _, where = rest.rpartition("@")
    return f"{scheme}://" + ("" if set(who) & AMBIGUOUS else re.split("[?#]", where)[0])


def check_url(url: str) -> None:
    """Raises UsageError for a URL of no database that can be opened."""
    scheme, separator, _ = url.partition("://")
    if separator and scheme not in ("sqlite", *POSTGRESQL):
        raise UsageError(f"{place(url)} is neither SQLite nor PostgreSQL",
                         "sqlite:///octavo.sqlite3", EXAMPLE)  # fmt: skip


def open_database(url: str | None, tables: Sequence[str]) -> Database:
    """`postgresql://USER:PASSWORD@HOST/NAME`, `sqlite:///PATH`, or a path; None: in memory. tables:
    SQL that makes what is not there. Raises OctavoError."""
    if url is None:
        return SQLite(None, tables)
    check_url(url)
    scheme, separator, rest = url.partition("://")
    if scheme in POSTGRESQL:
        return PostgreSQL(url, tables)
    return SQLite(Path(rest.removeprefix("/") if separator else url), tables)
