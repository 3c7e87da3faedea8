"""API keys and quotas in the database. `tinsmith keys` writes them; a running server reloads them every READ_S seconds.

A key is shown once, when it is created; only its SHA-256 is stored. A key is 256 random bits, so a salt or a slow hash,
which protect guessable passwords, would add nothing. While the database is unavailable, the server uses the keys and
quotas that it read last.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from tinsmith.errors import BadRequest, ConfigError, NotFound
from tinsmith.service.config import KEY_PREFIX
from tinsmith.service.storage.database import migrate, open_engine, retry_while_unavailable
from tinsmith.service.storage.tables import AUDIT, KEYS, QUOTAS
from tinsmith.settings import writable_folder

LOCAL = "local"
"""The tenant of the server's own key. Not derived from the key, so its data stays when the key changes."""
READ_S = 2.0
"""Time between two reads of the database by a server."""
COMMAND = "tinsmith keys"
"""The actor in audit-log entries of keys that the command creates and revokes."""
_NAME = re.compile(r"(?!\d+$)[A-Za-z0-9._@-]{1,100}")
"""Names of keys and tenants. Not digits only: a key can be revoked by its number too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """The record of an API key, without the key itself."""

    id: int
    """0 is the server's own key, which is not in the database."""
    name: str
    owner: str
    admin: bool = False
    """Whether the key may read the data of all tenants."""
    created: float
    expires: float | None = None
    revoked: float | None = None

    def is_valid(self, now: float) -> bool:
        """Whether the key is neither revoked nor expired."""
        return self.revoked is None and (self.expires is None or now < self.expires)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """Limits of one tenant; None is unlimited."""

    models: int | None = None
    """Models in training at a time."""
    checkpoint_bytes: int | None = None
    """Bytes of checkpoints on disk, including unnamed versions of open sessions."""
    queued: int | None = None
    """Training and sampling requests without a result."""
    tokens_per_minute: int | None = None
    """Trained, prompt and sampled tokens per minute."""


def generate_key() -> str:
    """A new key: 256 random bits after the prefix that the SDK requires."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def key_hash(key: str) -> str:
    """SHA-256 of a key, in hexadecimal, which is stored in its place."""
    return hashlib.sha256(key.encode()).hexdigest()


@asynccontextmanager
async def open_key_database(data: Path, database: str | None) -> AsyncIterator[AsyncEngine]:
    """Open the database of a data folder or at a URL for a command.

    Creates the tables of a new database. Never upgrades an existing one, which a server may be using.
    """
    if database is None:
        writable_folder(data, "--data")
    engine = open_engine(data, database)
    try:
        await migrate(engine, upgrade=False)
        yield engine
    finally:
        await engine.dispose()


async def create_key(
    engine: AsyncEngine, name: str, owner: str, *, admin: bool = False, lifetime_s: float | None = None
) -> tuple[str, ApiKey]:
    """Create a key. Returns (key, its record). Raises ConfigError if a name is taken or invalid."""
    for word in (name, owner):
        if not _NAME.fullmatch(word):
            raise ConfigError(
                f"'{word}' cannot name a key or a tenant.", "Use letters, digits and . _ @ - (not digits alone)."
            )
    key, now = generate_key(), time.time()
    values = {"name": name, "owner": owner, "admin": admin, "created": now}
    values["expires"] = now + lifetime_s if lifetime_s is not None else None
    async with _writing(engine) as db:
        if any(row.name == name and row.is_valid(now) for row in (await _keys(db)).values()):
            raise ConfigError(f"There is a key '{name}' already.", "Choose another name, or revoke it first.")
        inserted = await db.execute(insert(KEYS).values(**values, hash=key_hash(key)).returning(KEYS.c.id))
        await _audit(db, owner, "organization_key_created", name, COMMAND)
        return key, ApiKey(id=inserted.scalar_one(), **values)


async def revoke_key(engine: AsyncEngine, name: str, by: str = COMMAND) -> ApiKey:
    """Revoke a key by its name or number; a revoked key is not changed. Raises NotFound for an unknown key."""
    async with _writing(engine) as db:
        matches = [row for row in (await _keys(db)).values() if name in (row.name, str(row.id))]
        if not matches:
            raise NotFound(f"There is no key '{name}'.", "`tinsmith keys list` shows all keys.")
        key = min(matches, key=lambda row: (row.revoked is not None, -row.created))
        if key.revoked is None:
            key = replace(key, revoked=time.time())
            await db.execute(update(KEYS).where(KEYS.c.id == key.id).values(revoked=key.revoked))
            await _audit(db, key.owner, "organization_key_revoked", key.name, by)
        return key


async def set_quotas(engine: AsyncEngine, owner: str, changes: dict[str, int | None]) -> Quotas:
    """Change a tenant's quotas and return all of them. None removes a limit. Raises BadRequest for a negative value."""
    for name, value in changes.items():
        if value is not None and value < 0:
            raise BadRequest(f"Quota {name} is {value}.", "Give 0 or more.")
    async with _writing(engine) as db:
        current = (await _quotas(db)).get(owner)
        quotas = replace(current or Quotas(), **changes)
        values = {"owner": owner, **asdict(quotas)}
        statement = insert(QUOTAS) if current is None else update(QUOTAS).where(QUOTAS.c.owner == owner)
        await db.execute(statement.values(values))
        return quotas


async def read_keys(engine: AsyncEngine) -> tuple[dict[str, ApiKey], dict[str, Quotas]]:
    """Returns (keys by hash, quotas by tenant)."""
    async with engine.connect() as db:
        return await _keys(db), await _quotas(db)


@asynccontextmanager
async def _writing(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """A transaction that excludes all other writers of keys and quotas."""
    async with engine.execution_options(exclusive=True).begin() as db:
        if db.dialect.name == "postgresql":
            await db.exec_driver_sql("lock table keys, quotas in exclusive mode")
        yield db


async def _audit(db: AsyncConnection, owner: str, event: str, name: str, by: str) -> None:
    details = {"actor": by, "key": name}
    await db.execute(insert(AUDIT).values(owner=owner, at=time.time(), event=event, details=details))


async def _keys(db: AsyncConnection) -> dict[str, ApiKey]:
    rows = (await db.execute(select(KEYS).order_by(KEYS.c.id))).mappings()
    return {row["hash"]: ApiKey(**{name: value for name, value in row.items() if name != "hash"}) for row in rows}


async def _quotas(db: AsyncConnection) -> dict[str, Quotas]:
    rows = (await db.execute(select(QUOTAS))).mappings()
    return {row["owner"]: Quotas(**{name: value for name, value in row.items() if name != "owner"}) for row in rows}


class Tenants:
    """Keys and quotas of a running server: those of the database, and the server's own key."""

    def __init__(self, database: AsyncEngine, own_key: str | None) -> None:
        self._database = database
        self._own = key_hash(own_key) if own_key is not None else ""
        self._own_key = ApiKey(id=0, name=LOCAL, owner=LOCAL, admin=True, created=time.time())
        self._keys: dict[str, ApiKey] = {}
        self._quotas: dict[str, Quotas] = {}

    async def reload(self) -> None:
        """Read keys and quotas from the database."""
        self._keys, self._quotas = await retry_while_unavailable(self._database, lambda: read_keys(self._database))

    async def run(self) -> None:
        """Reload forever, every READ_S seconds."""
        while True:
            await asyncio.sleep(READ_S)
            await self.reload()

    def authenticate(self, key: str) -> ApiKey | None:
        """The record of a key; None if it is unknown, revoked or expired."""
        digest = key_hash(key)
        key_record = self._own_key if hmac.compare_digest(digest, self._own) else self._keys.get(digest)
        return key_record if key_record is not None and key_record.is_valid(time.time()) else None

    def key_by_id(self, key_id: int) -> ApiKey | None:
        """The record of a valid key by its number, which tokens contain."""
        if key_id == self._own_key.id and self._own:
            return self._own_key
        now = time.time()
        return next((key for key in self._keys.values() if key.id == key_id and key.is_valid(now)), None)

    def quotas(self, owner: str) -> Quotas:
        """A tenant's quotas."""
        return self._quotas.get(owner) or Quotas()

    @property
    def has_keys(self) -> bool:
        """Whether the database holds a valid key."""
        now = time.time()
        return any(key.is_valid(now) for key in self._keys.values())
