"""The configurations that gateways have had."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.release.database import Database


@dataclass(frozen=True)
class Config:
    version: int
    at: float
    who: str
    body: str


class ConfigHistory:
    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, body: str, who: str, now: float) -> Config:
        """Keeps a configuration as the next version, unless it is the last one again. Raises
        Conflict if another gateway keeps one at the same moment."""
        last = self.versions()[-1:]
        if last and last[0].body == body:
            return last[0]
        found = Config(last[0].version + 1 if last else 1, now, who, body)
        with self._database.transaction() as db:
            db.execute("insert into configs values (?, ?, ?, ?)", (found.version, now, who, body))
        return found

    def versions(self) -> list[Config]:
        """All of them, the first first."""
        with self._database.transaction() as db:
            rows = db.execute("select version, at, who, body from configs order by version")
        return [Config(int(version), *rest) for version, *rest in rows]
