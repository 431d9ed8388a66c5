"""The keys that a server knows, as they are kept now, and what is counted for them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter

from octavo.database import DatabaseError
from octavo.server.exchange import Exchange
from octavo.server.keys import Key, KeyStore, salt_of, today
from octavo.server.limits import Account, Shared

LOG = logging.getLogger("octavo.server")
LOOK = 1.0  # seconds between looks at what is kept
Row = tuple[int, str, str]  # day, key, model


class Keyring:
    """Accounts by the digests of keys. Raises DatabaseError if the keys cannot be read now.

    shared: counts what is used together with other servers.
    """

    def __init__(self, store: KeyStore, shared: Shared | None = None) -> None:
        self.store = store
        self._shared = shared
        self._version = store.version()
        self._accounts: dict[str, Account] = {}  # of all keys there were, by name
        self._known: dict[bytes, Account] = {}
        self._used: dict[Row, Counter[str]] = {}
        # Saving is done in a thread of its own, which may still be at it when the ring is closed.
        self._counting, self._saving = threading.Lock(), threading.Lock()
        self._away = False
        self._take(store.keys(), store.tokens_today())

    def _take(self, keys: dict[bytes, Key], used: dict[str, int]) -> None:
        known = {}
        for digest, key in keys.items():
            if key.name not in self._accounts:
                self._accounts[key.name] = Account(key, used.get(key.name, 0), shared=self._shared)
            self._accounts[key.name].key = key
            known[digest] = self._accounts[key.name]
        self._known = known
        self._owners = {salt_of(digest): account for digest, account in known.items()}

    def find(self, digest: bytes) -> Account | None:
        """The account of a key. Its digest is no secret: time tells nothing of the key."""
        return self._known.get(digest)

    def owner(self, salt: str) -> Account | None:
        """The account of the key with a salt."""
        return self._owners.get(salt)

    def count(self, one: Exchange) -> None:
        """Counts what an exchange has used, if one of its keys has sent it."""
        if one.key is None or one.usage is None or one.model is None:
            return
        with self._counting:
            row = self._used.setdefault((today(), one.key, one.model), Counter())
            row["requests"] += 1
            row["prompt"] += one.usage.seen
            row["cached"] += one.usage.cached
            row["completion"] += one.usage.completion

    def save(self) -> None:
        """Writes what was counted, and reads the keys if they have changed. May block.

        While the keys cannot be read, those that are known stay, and so does what was counted.
        """
        with self._saving:
            self._save()

    def _save(self) -> None:
        with self._counting:
            used, self._used = self._used, {}
        names = ("requests", "prompt", "cached", "completion")
        try:
            if used:
                self.store.count([(*row, *(c[n] for n in names)) for row, c in used.items()])
                used = {}
            if (version := self.store.version()) != self._version:
                keys, today_used = self.store.keys(), self.store.tokens_today()
                self._take(keys, today_used)
                self._version = version
        except DatabaseError as e:
            if not self._away:
                LOG.error("the keys stay as they were: %s", e)
            self._away = True
            with self._counting:
                for row, counts in used.items():
                    self._used.setdefault(row, Counter()).update(counts)
        else:
            if self._away:
                LOG.warning("the keys are read again")
            self._away = False

    async def watch(self) -> None:
        """Saves once a second, for ever."""
        while True:
            await asyncio.sleep(LOOK)
            await asyncio.to_thread(self.save)

    async def close(self) -> None:
        """Saves for the last time."""
        self.save()
        self.store.close()
        if self._shared is not None:
            await self._shared.close()
