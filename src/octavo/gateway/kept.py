"""Which upstream keeps a response, and whose it is, in the gateway's database."""

from __future__ import annotations

import time
from collections.abc import Callable

from octavo.database import Database

SECONDS = 30 * 86_400.0  # after which it is forgotten who keeps one
TABLES = (
    "create table if not exists gateway_responses (id text primary key, owner text not null,"
    " upstream text not null, at double precision not null)",
)
PUT = (
    "insert into gateway_responses values (?, ?, ?, ?) on conflict (id) do update set"
    " owner = excluded.owner, upstream = excluded.upstream, at = excluded.at"
)


class KeptResponses:
    """May be used from any thread. Raises DatabaseError. clock: seconds since 1970."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock
        self._swept = 0.0

    def put(self, id: str, owner: str, upstream: str) -> None:
        """A response is kept by an upstream from now on."""
        now = self._clock()
        with self._database.transaction() as db:
            db.execute(PUT, (id, owner, upstream, now))
            if now - self._swept > SECONDS / 1000:
                db.execute("delete from gateway_responses where at < ?", (now - SECONDS,))
                self._swept = now

    def find(self, id: str, owner: str) -> str | None:
        """The upstream that keeps an owner's response."""
        with self._database.transaction() as db:
            rows = db.execute(
                "select upstream from gateway_responses where id = ? and owner = ?", (id, owner)
            )
        return str(rows[0][0]) if rows else None

    def forget(self, id: str) -> None:
        with self._database.transaction() as db:
            db.execute("delete from gateway_responses where id = ?", (id,))
