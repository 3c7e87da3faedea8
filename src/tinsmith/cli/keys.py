"""The commands `tinsmith keys …`: they write to a service's database, whether its server runs or not."""

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

app = App(name="keys", help="Keys of tenants: make, list and revoke them, and say what each tenant may have.")

_NOUGHTS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SECONDS = {"m": 60, "h": 3600, "d": 86400}


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Whose keys: the options of `tinsmith serve` that say so."""

    config: Path | None = None
    """The service's file of settings."""
    data: Path | None = None
    """Its data folder; ~/.tinsmith if not given."""
    database: str | None = None
    """Its database, if that is not in the data folder."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of the tenant, all its keys together; what is not given stays as it is, and `none` lifts a limit."""

    models: str | None = None
    """Models in training at a time."""
    checkpoint_bytes: str | None = None
    """Bytes of checkpoints on disk, as 20G."""
    queued: str | None = None
    """Requests without a result."""
    tokens_per_minute: str | None = None
    """Tokens trained, read as prompts and sampled, as 500k."""

    def given(self) -> dict[str, int | None]:
        """The limits to change. Raises ConfigError for what is no number."""
        told = {
            "models": self.models,
            "checkpoint_bytes": self.checkpoint_bytes,
            "queued": self.queued,
            "tokens_per_minute": self.tokens_per_minute,
        }
        return {name: _amount(name, text) for name, text in told.items() if text is not None}


@app.command
def create(
    name: str,
    /,
    *,
    tenant: str | None = None,
    admin: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    expires: str | None = None,
    limits: Limits | None = None,
    where: Where | None = None,
) -> None:
    """Make a key and show it, this once. A running server knows it within seconds.

    Parameters
    ----------
    name
        What the key is called, here and in `keys list`.
    tenant
        Whose work it opens; keys of one tenant share everything. The key's name if not given.
    admin
        It may also see what concerns all tenants.
    expires
        When it ends, as 30d, 12h or 90m from now; never if not given.
    """
    from tinsmith.service.tenancy.keys import create_key, set_quotas

    owner = tenant or name
    changes = (limits or Limits()).given()
    lifetime = _duration(expires) if expires else None

    async def work(engine: AsyncEngine) -> str:
        key, _ = await create_key(engine, name, owner, admin=admin, lifetime_s=lifetime)
        if changes:
            await set_quotas(engine, owner, changes)
        return key

    _say(f"TINKER_API_KEY={_in(where, work)}")


@app.command(name="list")
def list_(*, where: Where | None = None) -> None:
    """Every key, revoked ones too, and what each tenant may have. The keys themselves are not kept."""
    from tinsmith.service.tenancy.keys import read_keys

    keys, quotas = _in(where, read_keys)
    rows = [("id", "name", "tenant", "", "made", "state"), *(_shown(key) for key in keys.values())]
    _say(_table(rows) if keys else "There are no keys but the server's own.")
    if quotas:
        _say("")
        _say(_table([("tenant", "may have at most"), *((owner, _told(of)) for owner, of in sorted(quotas.items()))]))


@app.command
def revoke(name: str, /, *, where: Where | None = None) -> None:
    """End a key, by its name or number. A running server refuses it within seconds; what it made stays its tenant's.

    Parameters
    ----------
    name
        As in `keys list`.
    """
    from tinsmith.service.tenancy.keys import revoke_key

    key = _in(where, lambda engine: revoke_key(engine, name))
    _say(f"Key {key.id} ({key.name}) of {key.owner} is revoked.")


@app.command
def limit(tenant: str, /, *, limits: Limits | None = None, where: Where | None = None) -> None:
    """Change what a tenant may have. A running server holds it to that within seconds.

    Parameters
    ----------
    tenant
        As in `keys list`.
    """
    from tinsmith.service.tenancy.keys import set_quotas

    changes = (limits or Limits()).given()
    if not changes:
        raise ConfigError("There is no limit to change.", "As in: tinsmith keys limit alice --models 4 --queued none")
    quotas = _in(where, lambda engine: set_quotas(engine, tenant, changes))
    _say(f"{tenant} may have at most: {_told(quotas)}.")


def _in(where: Where | None, work: Callable[[AsyncEngine], Awaitable[T]]) -> T:
    """The work's result, in the database of that service."""
    from tinsmith.service.config import ServeConfig
    from tinsmith.service.tenancy.keys import open_key_database
    from tinsmith.settings import COMMAND_LINE, build, read_values

    where = where or Where()
    given = {name: value for name, value in (("data", where.data), ("database", where.database)) if value is not None}
    place = str(where.config) if where.config else COMMAND_LINE
    config = build(ServeConfig, {**read_values(where.config), **given}, place)

    async def run() -> T:
        async with open_key_database(config.data, config.database) as engine:
            return await work(engine)

    return asyncio.run(run())


def _amount(name: str, text: str) -> int | None:
    if text == "none":
        return None
    parts = re.fullmatch(r"(\d[\d_]*)([kMGT]?)", text)
    if parts is None:
        raise ConfigError(f"--{name.replace('_', '-')} is '{text}'.", "Give a number, as 4, 500k or 20G, or none.")
    return int(parts[1]) * _NOUGHTS[parts[2]]


def _duration(text: str) -> float:
    parts = re.fullmatch(r"(\d+)([mhd])", text)
    if parts is None:
        raise ConfigError(f"--expires is '{text}'.", "Give minutes, hours or days, as 90m, 12h or 30d.")
    return float(parts[1]) * _SECONDS[parts[2]]


def _shown(key: ApiKey) -> tuple[str, ...]:
    state = "good"
    if key.revoked is not None:
        state = f"revoked {_day(key.revoked)}"
    elif key.expires is not None:
        state = f"{'until' if key.is_valid(time.time()) else 'over since'} {_day(key.expires)}"
    return str(key.id), key.name, key.owner, "admin" if key.admin else "", _day(key.created), state


def _told(quotas: Quotas) -> str:
    from dataclasses import asdict

    told = [f"{value} {name.replace('_', ' ')}" for name, value in asdict(quotas).items() if value is not None]
    return ", ".join(told) or "no limit"


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _table(rows: list[Any]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _say(text: str) -> None:
    import sys

    sys.stdout.write(text + "\n")
