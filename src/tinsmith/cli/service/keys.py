"""The commands `tinsmith keys …`. They write to the database of a service, whether its server runs or not."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import App, Parameter

from tinsmith.errors import ConfigError

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from tinsmith.service.tenancy.keys import ApiKey, Quotas

T = TypeVar("T")

app = App(name="keys", help="API keys of tenants: create, list and revoke keys, and set quotas.")

_MULTIPLIERS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SECONDS = {"m": 60, "h": 3600, "d": 86400}


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLocation:
    """The service whose keys to change, by options of `tinsmith serve`."""

    config: Path | None = None
    """YAML or TOML file of the service's settings."""
    data: Path | None = None
    """Data folder. Default: ~/.tinsmith."""
    database: str | None = None
    """Database URL. Default: SQLite in the data folder."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaChanges:
    """Quotas of the tenant, for all its keys together. Others stay unchanged; `none` removes a quota."""

    models: str | None = None
    """Models in training at the same time."""
    checkpoint_bytes: str | None = None
    """Bytes of checkpoints on disk, such as 20G."""
    queued: str | None = None
    """Requests in the queue or running."""
    tokens_per_minute: str | None = None
    """Tokens per minute, trained, prefilled and sampled, such as 500k."""

    def parsed(self) -> dict[str, int | None]:
        """The quotas to change. Raises ConfigError for an invalid number."""
        values = {
            "models": self.models,
            "checkpoint_bytes": self.checkpoint_bytes,
            "queued": self.queued,
            "tokens_per_minute": self.tokens_per_minute,
        }
        return {name: _amount(name, text) for name, text in values.items() if text is not None}


@app.command
def create(
    name: str,
    /,
    *,
    tenant: str | None = None,
    admin: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    expires: str | None = None,
    limits: QuotaChanges | None = None,
    where: ServiceLocation | None = None,
) -> None:
    """Create a key and print it, this once only. A running server accepts it within seconds.

    Parameters
    ----------
    name
        Name of the key, as `keys list` shows it.
    tenant
        Tenant of the key; keys of one tenant share everything. Default: the key's name.
    admin
        Also give access to the endpoints that concern all tenants.
    expires
        Lifetime, such as 30d, 12h or 90m. Default: no expiry.
    """
    from tinsmith.service.tenancy.keys import create_key, set_quotas

    owner = tenant or name
    changes = (limits or QuotaChanges()).parsed()
    lifetime = _duration(expires) if expires else None

    async def work(engine: AsyncEngine) -> str:
        key, _ = await create_key(engine, name, owner, admin=admin, lifetime_s=lifetime)
        if changes:
            await set_quotas(engine, owner, changes)
        return key

    _print(f"TINKER_API_KEY={_on_database(where, work)}")


@app.command(name="list")
def list_(*, where: ServiceLocation | None = None) -> None:
    """List all keys, revoked ones included, and the quotas of each tenant. The secrets themselves are not stored."""
    from tinsmith.service.tenancy.keys import read_keys

    keys, quotas = _on_database(where, read_keys)
    rows = [("id", "name", "tenant", "", "created", "state"), *(_key_row(key) for key in keys.values())]
    _print(_table(rows) if keys else "There are no keys except the server's own.")
    if quotas:
        _print("")
        _print(_table([("tenant", "quotas"), *((owner, _quotas_text(own)) for owner, own in sorted(quotas.items()))]))


@app.command
def revoke(name: str, /, *, where: ServiceLocation | None = None) -> None:
    """Revoke a key by name or id. A running server rejects it within seconds. The tenant keeps its data.

    Parameters
    ----------
    name
        As in `keys list`.
    """
    from tinsmith.service.tenancy.keys import revoke_key

    key = _on_database(where, lambda engine: revoke_key(engine, name))
    _print(f"Key {key.id} ({key.name}) of {key.owner} is revoked.")


@app.command
def limit(tenant: str, /, *, limits: QuotaChanges | None = None, where: ServiceLocation | None = None) -> None:
    """Change the quotas of a tenant. A running server applies them within seconds.

    Parameters
    ----------
    tenant
        As in `keys list`.
    """
    from tinsmith.service.tenancy.keys import read_keys, set_quotas

    changes = (limits or QuotaChanges()).parsed()
    if not changes:
        raise ConfigError("There is no quota to change.", "Example: tinsmith keys limit alice --models 4 --queued none")

    async def work(engine: AsyncEngine) -> tuple[Quotas, bool]:
        quotas = await set_quotas(engine, tenant, changes)
        keys, _ = await read_keys(engine)
        return quotas, any(key.owner == tenant for key in keys.values())

    quotas, has_key = _on_database(where, work)
    _print(f"Quotas of {tenant}: {_quotas_text(quotas)}.")
    if not has_key:
        _print(f"No key belongs to {tenant} yet: tinsmith keys list shows the tenants.")


def _on_database(where: ServiceLocation | None, work: Callable[[AsyncEngine], Awaitable[T]]) -> T:
    """Run `work` on the database of the service and return its result."""
    from tinsmith.overrides import COMMAND_LINE
    from tinsmith.service.config import ServeConfig
    from tinsmith.service.tenancy.keys import open_key_database
    from tinsmith.settings import build, read_values

    where = where or ServiceLocation()
    values = {name: value for name, value in (("data", where.data), ("database", where.database)) if value is not None}
    place = str(where.config) if where.config else COMMAND_LINE
    config = build(ServeConfig, {**read_values(ServeConfig, where.config), **values}, place)

    async def run() -> T:
        async with open_key_database(config.data, config.database) as engine:
            return await work(engine)

    return asyncio.run(run())


def _amount(name: str, text: str) -> int | None:
    if text == "none":
        return None
    parts = re.fullmatch(r"(\d[\d_]*)([kMGT]?)", text)
    if parts is None:
        raise ConfigError(f"--{name.replace('_', '-')} is '{text}'.", "Use a number such as 4, 500k or 20G, or none.")
    return int(parts[1]) * _MULTIPLIERS[parts[2]]


def _duration(text: str) -> float:
    parts = re.fullmatch(r"(\d+)([mhd])", text)
    if parts is None:
        raise ConfigError(f"--expires is '{text}'.", "Use minutes, hours or days, such as 90m, 12h or 30d.")
    return float(parts[1]) * _SECONDS[parts[2]]


def _key_row(key: ApiKey) -> tuple[str, ...]:
    state = "valid"
    if key.revoked is not None:
        state = f"revoked {_day(key.revoked)}"
    elif key.expires is not None:
        state = f"{'until' if key.is_valid(time.time()) else 'expired'} {_day(key.expires)}"
    return str(key.id), key.name, key.owner, "admin" if key.admin else "", _day(key.created), state


def _quotas_text(quotas: Quotas) -> str:
    from dataclasses import asdict

    values = [f"{name.replace('_', ' ')} {value}" for name, value in asdict(quotas).items() if value is not None]
    return ", ".join(values) or "no limit"


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _table(rows: list[Any]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _print(text: str) -> None:
    import sys

    sys.stdout.write(text + "\n")
