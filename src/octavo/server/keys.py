"""API keys with names, roles and limits, and what each has used, in an SQLite file or PostgreSQL.

Keys are stored as SHA-256 digests. Commands write them while servers read.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from octavo.database import Conflict, open_database
from octavo.errors import UsageError

Role = Literal["user", "admin"]
DAY = 86_400
TABLES = (
    "create table if not exists keys (digest bytea primary key, name text unique not null,"
    " role text not null, created bigint not null, requests_per_minute bigint,"
    " tokens_per_minute bigint, tokens_per_day bigint, concurrent bigint, models text not null)",
    "create table if not exists usage (day bigint not null, key text not null,"
    " model text not null, requests bigint not null, prompt bigint not null,"
    " cached bigint not null, completion bigint not null, primary key (day, key, model))",
    "create table if not exists key_changes (what text primary key, count bigint not null)",
)
_COUNT = (
    "insert into usage values (?, ?, ?, ?, ?, ?, ?) on conflict (day, key, model) do update set"
    " requests = usage.requests + excluded.requests, prompt = usage.prompt + excluded.prompt,"
    " cached = usage.cached + excluded.cached,"
    " completion = usage.completion + excluded.completion"
)
_CHANGED = (
    "insert into key_changes values ('keys', 1)"
    " on conflict (what) do update set count = key_changes.count + 1"
)


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


class KeyStore:
    """The keys of a file, or of a PostgreSQL server by its URL. Any thread may use it.

    Raises DatabaseError; for a URL that says neither, UsageError.
    """

    def __init__(self, url: str) -> None:
        self._database = open_database(url, TABLES)

    def close(self) -> None:
        self._database.close()

    def create(self, key: Key) -> str:
        """Adds a key and gives its secret, which is not kept. UsageError: the name is taken."""
        secret = "sk-" + secrets.token_urlsafe(32)
        limits = key.limits
        row = (
            digest(secret.encode()), key.name, key.role, int(time.time()),
            limits.requests_per_minute, limits.tokens_per_minute, limits.tokens_per_day,
            limits.concurrent, "\n".join(key.models),
        )  # fmt: skip
        try:
            with self._database.transaction() as db:
                db.execute("insert into keys values (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
                db.execute(_CHANGED)
        except Conflict:
            raise UsageError(f"there is a key called {key.name!r}", "octavo key list") from None
        return secret

    def revoke(self, name: str) -> None:
        """Deletes a key; what it has used stays. Raises UsageError if there is none."""
        with self._database.transaction() as db:
            if not db.execute("delete from keys where name = ? returning name", (name,)):
                raise UsageError(f"no key is called {name!r}", "octavo key list")
            db.execute(_CHANGED)

    def version(self) -> int:
        """A number that grows when keys come or go."""
        with self._database.transaction() as db:
            rows = db.execute("select count from key_changes where what = 'keys'")
        return int(rows[0][0]) if rows else 0

    def keys(self) -> dict[bytes, Key]:
        """Every key, by the digest of its secret."""
        with self._database.transaction() as db:
            rows = db.execute("select * from keys order by name")
        return {row[0]: _key(*row[1:]) for row in rows}

    def count(self, used: Iterable[tuple[Any, ...]]) -> None:
        """Adds to what was used: rows of day, key, model, requests, prompt, cached, completion."""
        with self._database.transaction() as db:
            db.many(_COUNT, sorted(used))  # in one order: servers never wait for each other

    def usage(self, days: int = 30, key: str | None = None) -> list[Used]:
        """What was used in the last days, of one key or of all."""
        whose, values = ("", ()) if key is None else (" and key = ?", (key,))
        asked = f"select * from usage where day > ?{whose} order by day, key, model"
        with self._database.transaction() as db:
            rows = db.execute(asked, (today() - days, *values))
        return [Used(time.strftime("%Y-%m-%d", time.gmtime(r[0] * DAY)), *r[1:]) for r in rows]

    def tokens_today(self) -> dict[str, int]:
        """Tokens computed today, by key."""
        asked = (
            "select key, sum(prompt - cached + completion) from usage where day = ? group by key"
        )
        with self._database.transaction() as db:
            return {key: int(tokens) for key, tokens in db.execute(asked, (today(),))}


def _key(name: str, role: Role, created: int, *rest: Any) -> Key:
    *limits, models = rest
    return Key(name, role, KeyLimits(*limits), tuple(filter(None, models.split("\n"))), created)
