"""The audit log, the timing of each request, and usage counters, in the database.

Entries are collected in memory and written a moment later in one transaction; readers flush first. A killed process
loses the entries of its last second, but no request or result.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, date, datetime
from datetime import time as midnight
from typing import Any

from sqlalchemy import Connection, delete, select, update

from tinsmith.service.observability.metrics import Timeline
from tinsmith.service.storage.database import uninterrupted
from tinsmith.service.storage.records import Checkpoint, Model, SamplingSession
from tinsmith.service.storage.store import Store, insert_into
from tinsmith.service.storage.tables import AUDIT, SPANS, STORED, USAGE

REST_S = 1.0
"""Between two writes."""
KEEP_SPANS_S = 7 * 86_400
"""Time that the timings of a request stay."""
PRUNE_S = 3600.0
TRAINED = ("forward", "forward_backward")


class AuditLog:
    """Entries that wait to be written to the database, in batches."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._audits: list[dict[str, Any]] = []
        self._spans: list[dict[str, Any]] = []
        self._used: Counter[tuple[str, int, str, str, str]] = Counter()
        self._stored: set[str] = set()
        """Checkpoints that the database says are still there."""
        self._more = asyncio.Event()
        self._writing = asyncio.Lock()

    async def load(self) -> None:
        """Read which checkpoints an earlier process recorded as stored."""
        async with self._store.database.connect() as db:
            self._stored = set((await db.execute(select(STORED.c.id).where(STORED.c.ended.is_(None)))).scalars())
        self._more.set()

    def record(self, owner: str, event: str, actor: str, **details: Any) -> None:
        """Something was done by `actor` to what belongs to `owner`; `event` is RESOURCE_ACTION."""
        entry = {"owner": owner, "at": time.time(), "event": event, "details": {"actor": actor, **details}}
        self._audits.append(entry)
        self._more.set()

    def checkpoint_created(self, checkpoint: Checkpoint, actor: str, **details: Any) -> None:
        """A named checkpoint came into being."""
        self.record(checkpoint.owner, "checkpoint_created", actor, **_about(checkpoint), **details)
        hour, session = int(checkpoint.created // 3600), self._session(checkpoint.run)
        self._used[checkpoint.owner, hour, "checkpoint", checkpoint.base_model, session] += 1

    def checkpoint_read(self, checkpoint: Checkpoint, actor: str, purpose: str) -> None:
        """A tenant was given the contents of a checkpoint."""
        self.record(checkpoint.owner, "checkpoint_read", actor, **_about(checkpoint), purpose=purpose)

    def checkpoint_changed(self, checkpoint: Checkpoint, event: str, actor: str, **details: Any) -> None:
        """A checkpoint was changed, as `event` says."""
        self.record(checkpoint.owner, event, actor, **_about(checkpoint), **details)

    def request_finished(self, line: Timeline) -> None:
        """Record the timing and the usage of a finished request."""
        track = line.request_id.rpartition(":")[0]
        on = self._store.find(Model, track) or self._store.find(SamplingSession, track)
        session, base_model = (on.session_id, on.base_model) if on else ("", line.model)
        tokens = line.tokens
        trained = sum(tokens.get(kind, 0) for kind in TRAINED)
        cached = tokens.get("prompt_cached", 0)
        self._spans.append(
            {
                "id": line.request_id,
                "owner": line.owner,
                "session_id": session,
                "base_model": base_model,
                "track": track,
                "kind": line.kind,
                "state": "failed" if line.error else "done",
                "submitted": line.accepted / 1e9,
                "begun": (line.started or line.finished) / 1e9,
                "ended": line.finished / 1e9,
                "tokens": trained + tokens.get("sample", 0),
                "prompt_tokens": tokens.get("prompt", 0),
                "cached_tokens": cached,
            }
        )
        used = {
            "training": trained,
            "sampling_prefill": tokens.get("prompt", 0) - cached,
            "sampling_prefill_cached": cached,
            "sampling_sample": tokens.get("sample", 0),
        }
        for kind, count in used.items():
            if count:
                self._used[line.owner, line.finished // 3_600_000_000_000, kind, base_model, session] += count
        self._more.set()

    async def run(self) -> None:
        """Forever: write new entries and delete old timings."""
        pruned = 0.0
        while True:
            await self._more.wait()
            await self.flush()
            if pruned + PRUNE_S <= time.time():
                pruned = time.time()
                long_over = delete(SPANS).where(SPANS.c.ended < pruned - KEEP_SPANS_S)
                await self._store.write(lambda db, over=long_over: db.execute(over))
            await asyncio.sleep(REST_S)

    async def flush(self) -> None:
        """Everything noted so far is in the database when this returns, also if it is cancelled meanwhile."""
        await uninterrupted(self._flush())

    async def _flush(self) -> None:
        async with self._writing:
            self._more.clear()
            audits, spans, used = self._audits, self._spans, self._used
            self._audits, self._spans, self._used = [], [], Counter()
            added, removed = self._storage()
            if not (audits or spans or used or added or removed):
                return

            def written(db: Connection) -> None:
                _write(db, audits, spans, used)
                _write_storage(db, added, removed)

            try:
                await self._store.write(written)
            except BaseException:
                self._audits, self._spans = audits + self._audits, spans + self._spans
                self._used.update(used)
                self._more.set()
                raise
            self._stored |= {entry["id"] for entry in added}
            self._stored -= removed

    async def entries(self, owner: str, kind: str, day: date) -> list[dict[str, Any]]:
        """An owner's entries of one day in UTC, oldest first; `kind` is a resource in the plural, or `all`."""
        await self.flush()
        start = datetime.combine(day, midnight(), UTC).timestamp()
        a = AUDIT.c
        query = select(a.at, a.event, a.details).where(a.owner == owner, a.at >= start, a.at < start + 86_400)
        if kind != "all":
            query = query.where(a.event.startswith(f"{kind.removesuffix('s')}_", autoescape=True))
        async with self._store.database.connect() as db:
            return [dict(entry) for entry in (await db.execute(query.order_by(a.at, a.id))).mappings()]

    def _storage(self) -> tuple[list[dict[str, Any]], set[str]]:
        """Named checkpoints that the database does not know yet, and those that are no more."""
        current = {
            entry.id: entry for entry in self._store.all(Checkpoint) if entry.kind != "ephemeral" and not entry.deleted
        }
        added = [
            {
                "id": entry.id,
                "owner": entry.owner,
                "session_id": self._session(entry.run),
                "base_model": entry.base_model,
                "size_bytes": entry.size_bytes,
                "begun": entry.created,
            }
            for entry in (current[key] for key in current.keys() - self._stored)
        ]
        return added, self._stored - current.keys()

    def _session(self, run: str) -> str:
        model = self._store.find(Model, run)
        return model.session_id if model else ""


def _about(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"tinker_path": checkpoint.path, "model_id": checkpoint.run}


def _write(
    db: Connection,
    audits: Sequence[dict[str, Any]],
    spans: Sequence[dict[str, Any]],
    used: Counter[tuple[str, int, str, str, str]],
) -> None:
    if audits:
        db.execute(AUDIT.insert(), audits)
    if spans:
        db.execute(insert_into(db, SPANS).on_conflict_do_nothing(), spans)
    if used:
        keys = ("owner", "hour", "kind", "base_model", "session_id")
        adding = insert_into(db, USAGE)
        more = {"quantity": USAGE.c.quantity + adding.excluded.quantity}
        rows = [{**dict(zip(keys, key, strict=True)), "quantity": count} for key, count in used.items()]
        db.execute(adding.on_conflict_do_update(index_elements=list(keys), set_=more), rows)


def _write_storage(db: Connection, added: Sequence[dict[str, Any]], removed: set[str]) -> None:
    if added:
        db.execute(insert_into(db, STORED).on_conflict_do_nothing(), added)
    for key in removed:
        db.execute(update(STORED).where(STORED.c.id == key).values(ended=time.time()))
