"""Who is behind a key, and what that tenant may have, as the running server knows it.

Keys and quotas are written by `tinsmith keys` into the database and read from there every few seconds, so asking costs
nothing. If the database is away, what was read last holds.
"""

from __future__ import annotations

import asyncio
import hmac
import time

from sqlalchemy.ext.asyncio import AsyncEngine

from tinsmith.service.database import patiently
from tinsmith.service.keys import LOCAL, ApiKey, Quotas, digest_of, read_keys

READ_S = 2.0


class Tenants:
    """The keys of one database, and the server's own."""

    def __init__(self, database: AsyncEngine, own_key: str | None) -> None:
        self._database = database
        self._own = digest_of(own_key) if own_key is not None else ""
        self._own_key = ApiKey(id=0, name=LOCAL, owner=LOCAL, admin=True, created=time.time())
        self._keys: dict[str, ApiKey] = {}
        self._quotas: dict[str, Quotas] = {}

    async def read(self) -> None:
        """What the database says now."""
        self._keys, self._quotas = await patiently(self._database, lambda: read_keys(self._database))

    async def run(self) -> None:
        """For ever: read again."""
        while True:
            await asyncio.sleep(READ_S)
            await self.read()

    def find(self, key: str) -> ApiKey | None:
        """The key's record, if it is good."""
        digest = digest_of(key)
        found = self._own_key if hmac.compare_digest(digest, self._own) else self._keys.get(digest)
        return found if found is not None and found.is_good(time.time()) else None

    def get(self, key_id: int) -> ApiKey | None:
        """The same by its number, for whoever holds something that was given for a key."""
        if key_id == self._own_key.id and self._own:
            return self._own_key
        now = time.time()
        return next((one for one in self._keys.values() if one.id == key_id and one.is_good(now)), None)

    def quotas(self, owner: str) -> Quotas:
        """What a tenant may have."""
        return self._quotas.get(owner) or Quotas()

    @property
    def has_keys(self) -> bool:
        """Whether somebody can come in by a key that was made for it."""
        now = time.time()
        return any(one.is_good(now) for one in self._keys.values())
