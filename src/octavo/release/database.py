"""An SQLite file, or a PostgreSQL server by its URL: the same SQL for both."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from octavo.errors import OctavoError, UsageError

WAIT = 5  # seconds for another gateway to finish writing, and for a server to answer
Row = tuple[Any, ...]

# Both know these types: SQLite goes by parts of their names.
SCHEMA = (
    "create table if not exists releases (id text primary key, model text not null,"
    " created double precision not null, ended bigint not null, version bigint not null,"
    " spec text not null, state text not null)",
    "create unique index if not exists one_release on releases (model) where ended = 0",
    "create table if not exists sums (release text not null, gateway text not null,"
    " step bigint not null, part bigint not null, numbers bytea not null,"
    " primary key (release, gateway, step, part))",
    "create table if not exists experiments (id text primary key,"
    " created double precision not null, ended bigint not null, version bigint not null,"
    " spec text not null, allocation text not null)",
    "create table if not exists units (experiment text not null, variant text not null,"
    " unit text not null, name text not null, count double precision not null,"
    " total double precision not null, primary key (experiment, variant, unit, name))",
    "create table if not exists audit (id text primary key, at double precision not null,"
    " subject text not null, who text not null, what text not null, detail text not null)",
    "create table if not exists leases (name text primary key, owner text not null,"
    " until double precision not null)",
)


class DatabaseError(OctavoError):
    """The database cannot be used. Whoever has work for it keeps it and tries again."""


class Conflict(OctavoError):
    """Somebody else wrote it first."""


class DatabaseConnection(Protocol):
    def execute(self, sql: str, values: Sequence[Any] = ()) -> list[Row]: ...

    def many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None: ...


class Database(Protocol):
    """All of it may be called from any thread."""

    def transaction(self) -> Any:
        """A context with a Connection: all that is done in it, or nothing. Raises DatabaseError,
        Conflict for a key that is there already."""
        ...

    def close(self) -> None: ...


class SQLite:
    """A file, which several processes may use at a time; None: memory, which ends with this one."""

    def __init__(self, path: Path | None) -> None:
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
                self._db.execute("pragma journal_mode = wal")
                self._db.execute("pragma synchronous = normal")
            except (sqlite3.Error, OSError) as e:
                raise DatabaseError(f"{path} cannot be used: {e}") from None
            _create(self)
            undo.pop_all()

    def execute(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        return self._db.execute(sql, values).fetchall()

    def many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        self._db.executemany(sql, rows)

    @contextmanager
    def transaction(self) -> Iterator[DatabaseConnection]:
        with self._lock:
            try:
                self._db.execute("begin immediate")
                with self._db:
                    yield self
            except sqlite3.IntegrityError as e:
                raise Conflict(str(e)) from None
            except sqlite3.Error as e:
                raise DatabaseError(f"{self._name} cannot be used: {e}") from None

    def close(self) -> None:
        self._db.close()


class PostgreSQL:
    """A server. A connection that is lost is opened again by the next transaction."""

    def __init__(self, url: str) -> None:
        try:
            import psycopg
        except ImportError:
            raise UsageError(
                "PostgreSQL needs a client", 'pip install "octavo[postgresql]"'
            ) from None
        self._module, self._url = psycopg, url
        self._lock = threading.Lock()
        self._db: Any = None
        with ExitStack() as undo:
            undo.callback(self.close)
            _create(self)
            undo.pop_all()

    def execute(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        done = self._db.execute(sql.replace("?", "%s"), values)
        return done.fetchall() if done.description else []

    def many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        with self._db.cursor() as cursor:
            cursor.executemany(sql.replace("?", "%s"), rows)

    @contextmanager
    def transaction(self) -> Iterator[DatabaseConnection]:
        wrong = self._module.errors
        with self._lock:
            try:
                if self._db is None or self._db.closed:
                    self._db = self._module.connect(
                        self._url, connect_timeout=WAIT, autocommit=True
                    )
                with self._db.transaction():
                    yield self
            except (wrong.UniqueViolation, wrong.DuplicateObject, wrong.DuplicateTable) as e:
                raise Conflict(str(e)) from None
            except self._module.Error as e:
                why = str(e).replace(self._url, place(self._url))  # of which it may quote all
                raise DatabaseError(f"{place(self._url)} cannot be used: {why}") from None

    def close(self) -> None:
        if self._db is not None:
            self._db.close()


def _create(database: Database) -> None:
    for table in SCHEMA:
        with suppress(Conflict), database.transaction() as db:
            db.execute(table)  # two that begin at the same time: the other has made it


def place(url: str) -> str:
    """A URL without its password."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url.partition("://")[0] + "://"
    return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"


def open_database(url: str | None) -> Database:
    """`postgresql://USER:PASSWORD@HOST/NAME`, `sqlite:///PATH`, or a path; None: in memory. Raises
    OctavoError."""
    if url is None:
        return SQLite(None)
    scheme, separator, rest = url.partition("://")
    if scheme in ("postgresql", "postgres"):
        return PostgreSQL(url)
    if separator and scheme != "sqlite":
        raise UsageError(f"--database {place(url)!r} is neither SQLite nor PostgreSQL",
                         "--database sqlite:///octavo-gateway.sqlite3")  # fmt: skip
    return SQLite(Path(rest.removeprefix("/") if separator else url))
