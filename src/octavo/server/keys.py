"""API keys with names, roles and limits, and what each has used, in one SQLite file.

Keys are stored as SHA-256 digests. Commands write the file while servers read it.
"""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from octavo.errors import OctavoError, UsageError

Role = Literal["user", "admin"]
DAY = 86_400
WAIT = 5.0  # seconds for another process to finish writing
_TABLES = """
create table if not exists keys (
  digest blob primary key, name text unique not null, role text not null, created integer not null,
  requests_per_minute integer, tokens_per_minute integer, tokens_per_day integer,
  concurrent integer, models text not null);
create table if not exists usage (
  day integer not null, key text not null, model text not null, requests integer not null,
  prompt integer not null, cached integer not null, completion integer not null,
  primary key (day, key, model));
"""
_COUNT = """
insert into usage values (?, ?, ?, ?, ?, ?, ?) on conflict (day, key, model) do update set
  requests = requests + excluded.requests, prompt = prompt + excluded.prompt,
  cached = cached + excluded.cached, completion = completion + excluded.completion
"""


class KeyFileError(OctavoError):
    """The file with the keys cannot be read or written."""


@dataclass(frozen=True)
class KeyLimits:
    """What a key may use; None: as much as it likes. Tokens are those that were computed."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    concurrent: int | None = None


@dataclass(frozen=True)
class Key:
    """Who has a key. models: that it may use; none: all."""

    name: str
    role: Role = "user"
    limits: KeyLimits = KeyLimits()
    models: tuple[str, ...] = ()
    created: int = 0


@dataclass(frozen=True)
class Used:
    """What a key has used of a model on a day (UTC), in tokens; cached: of the prompts."""

    day: str
    key: str
    model: str
    requests: int
    prompt: int
    cached: int
    completion: int


def digest(secret: bytes) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(secret).digest()


def salt_of(digest: bytes) -> str:
    """What tells apart what keys keep and cache, without telling the key."""
    return hashlib.sha256(b"salt" + digest).hexdigest()[:16]


def today() -> int:
    """Days since 1970, UTC."""
    return int(time.time()) // DAY


class KeyFile:
    """The file. Each use opens it, so that any thread may. Raises KeyFileError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch(0o600)
            connection = sqlite3.connect(self.path, timeout=WAIT)
            try:
                connection.execute("pragma journal_mode = wal")
                connection.executescript(_TABLES)
                with connection:
                    yield connection
            finally:
                connection.close()
        except (sqlite3.Error, OSError) as e:
            raise KeyFileError(f"{self.path.name} cannot be used: {e}") from None

    def create(self, key: Key) -> str:
        """Adds a key and gives its secret, which is not kept. UsageError: the name is taken."""
        secret = "sk-" + secrets.token_urlsafe(32)
        limits = key.limits
        row = (
            digest(secret.encode()), key.name, key.role, int(time.time()),
            limits.requests_per_minute, limits.tokens_per_minute, limits.tokens_per_day,
            limits.concurrent, "\n".join(key.models),
        )  # fmt: skip
        with self._open() as connection:
            taken = connection.execute("select 1 from keys where name = ?", (key.name,)).fetchone()
            if taken is not None:
                raise UsageError(f"there is a key called {key.name!r}", "octavo key list")
            connection.execute("insert into keys values (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            _changed(connection)
        return secret

    def revoke(self, name: str) -> None:
        """Deletes a key; what it has used stays. Raises UsageError if there is none."""
        with self._open() as connection:
            if not connection.execute("delete from keys where name = ?", (name,)).rowcount:
                raise UsageError(f"no key is called {name!r}", "octavo key list")
            _changed(connection)

    def version(self) -> int:
        """A number that grows when keys come or go."""
        with self._open() as connection:
            return int(connection.execute("pragma user_version").fetchone()[0])

    def keys(self) -> dict[bytes, Key]:
        """Every key, by the digest of its secret."""
        with self._open() as connection:
            rows = connection.execute("select * from keys order by name").fetchall()
        return {row[0]: _key(*row[1:]) for row in rows}

    def count(self, used: Iterable[tuple[Any, ...]]) -> None:
        """Adds to what was used: rows of day, key, model, requests, prompt, cached, completion."""
        with self._open() as connection:
            connection.executemany(_COUNT, used)

    def usage(self, days: int = 30, key: str | None = None) -> list[Used]:
        """What was used in the last days, of one key or of all."""
        asked = (
            "select * from usage where day > ? and (? is null or key = ?) order by day, key, model"
        )
        with self._open() as connection:
            rows = connection.execute(asked, (today() - days, key, key)).fetchall()
        return [Used(time.strftime("%Y-%m-%d", time.gmtime(r[0] * DAY)), *r[1:]) for r in rows]

    def tokens_today(self) -> dict[str, int]:
        """Tokens computed today, by key."""
        total = "sum(prompt - cached + completion)"
        asked = f"select key, {total} from usage where day = ? group by key"
        with self._open() as connection:
            return dict(connection.execute(asked, (today(),)).fetchall())


def _changed(connection: sqlite3.Connection) -> None:
    version = connection.execute("pragma user_version").fetchone()[0]
    connection.execute(f"pragma user_version = {int(version) + 1}")


def _key(name: str, role: Role, created: int, *rest: Any) -> Key:
    *limits, models = rest
    return Key(name, role, KeyLimits(*limits), tuple(filter(None, models.split("\n"))), created)
