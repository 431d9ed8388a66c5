"""The configurations that have been in force, in the gateway's database."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import msgspec

from octavo.database import Conflict, Database
from octavo.errors import RequestError
from octavo.gateway.config import GatewayConfig, convert

KEPT = 100  # of the latest
TRIES = 5  # beside other gateways that write at the same time
TABLES = (
    "create table if not exists gateway_configs (version bigint primary key,"
    " at double precision not null, who text not null, hash text not null, body text not null)",
)


class NoSuchConfig(RequestError):
    status = 404


@dataclass(frozen=True)
class Applied:
    """A configuration that was put in force. who: the name of a key, or what had it read."""

    version: int
    at: float
    who: str
    hash: str


def hash_of(config: GatewayConfig) -> str:
    """Equal for equal configurations."""
    return sha256(_encode(config)).hexdigest()[:16]


def _encode(config: GatewayConfig) -> bytes:
    return msgspec.json.encode(config, order="deterministic")


class ConfigHistory:
    """May be used from any thread. Raises DatabaseError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, config: GatewayConfig, who: str, now: float) -> Applied:
        """Keeps what is in force from now on, unless it is the last one again."""
        body, hash = _encode(config).decode(), hash_of(config)
        for tried in range(TRIES):
            last = self.latest()[:1]
            if last and last[0].hash == hash:
                return last[0]
            found = Applied(last[0].version + 1 if last else 1, now, who, hash)
            try:
                with self._database.transaction() as db:
                    row = (found.version, now, who, hash, body)
                    db.execute("insert into gateway_configs values (?, ?, ?, ?, ?)", row)
                    old = (found.version - KEPT,)
                    db.execute("delete from gateway_configs where version <= ?", old)
                return found
            except Conflict:
                if tried + 1 == TRIES:
                    raise
        raise AssertionError

    def latest(self) -> list[Applied]:
        """Those that are kept, the last first."""
        with self._database.transaction() as db:
            rows = db.execute(
                "select version, at, who, hash from gateway_configs order by version desc"
            )
        return [Applied(int(version), at, who, hash) for version, at, who, hash in rows]

    def get(self, version: int) -> GatewayConfig:
        """One of them. Raises NoSuchConfig, UsageError if this Octavo cannot read it any more."""
        with self._database.transaction() as db:
            rows = db.execute("select body from gateway_configs where version = ?", (version,))
        if not rows:
            raise NoSuchConfig(f"no configuration {version} is kept", "version")
        return convert(msgspec.json.decode(rows[0][0]), GatewayConfig)
