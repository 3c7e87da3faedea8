"""The audit log, the timing of each request, and usage counters, in the database.

Entries are collected in memory and written about once per second in one transaction; readers flush first. A killed
process loses the entries of its last second, but no request or result.
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
from sqlalchemy.dialects import postgresql

from tinsmith.service.observability.metrics import Timeline
from tinsmith.service.storage.database import uninterrupted
from tinsmith.service.storage.records import Checkpoint, Model, SamplingSession
from tinsmith.service.storage.row_statements import RowStatement
from tinsmith.service.storage.store import Store, insert_into
from tinsmith.service.storage.tables import AUDIT, SPANS, STORED, USAGE

WRITE_INTERVAL_S = 1.0
"""Time between two writes."""
KEEP_SPANS_S = 7 * 86_400
"""Time that the timing of a request is kept."""
USAGE_S = 14 * 86_400
"""Least time that usage is kept: the longest window of a query."""
PRUNE_S = 3600.0
"""Time between two deletions of old entries."""
TRAINING_KINDS = ("forward", "forward_backward")
"""Token kinds that count as training."""
_SPAN = tuple(SPANS.c.keys())
_USAGE = tuple(USAGE.c.keys())
_INSERT_USAGE = postgresql.insert(USAGE)
_ADD_SPANS = RowStatement(
    columns=_SPAN,
    sqlite=f"INSERT INTO spans ({', '.join(_SPAN)}) VALUES {{rows}} ON CONFLICT DO NOTHING",
    postgresql=postgresql.insert(SPANS).on_conflict_do_nothing(),
)
_ADD_USAGE = RowStatement(
    columns=_USAGE,
    sqlite=f"INSERT INTO usage ({', '.join(_USAGE)}) VALUES {{rows}} "
    f"ON CONFLICT ({', '.join(_USAGE[:-1])}) DO UPDATE SET quantity = quantity + excluded.quantity",
    postgresql=_INSERT_USAGE.on_conflict_do_update(
        index_elements=_USAGE[:-1], set_={"quantity": USAGE.c.quantity + _INSERT_USAGE.excluded.quantity}
    ),
)


class AuditLog:
    """Collects entries and writes them to the database in batches."""

    def __init__(self, store: Store, retention_s: float) -> None:
        self._store = store
        self._retention_s = retention_s
        self._audits: list[dict[str, Any]] = []
        self._spans: list[dict[str, Any]] = []
        self._usage: Counter[tuple[str, int, str, str, str]] = Counter()
        """Quantity by (owner, hour, kind, base model, session)."""
        self._stored: set[str] = set()
        """Named checkpoints that the database records as stored."""
        self._changed: set[str] = set()
        """Checkpoints whose rows may have to be written."""
        self._pending = asyncio.Event()
        self._writing = asyncio.Lock()

    async def load(self) -> None:
        """Read which checkpoints an earlier process recorded as stored."""
        async with self._store.database.connect() as db:
            self._stored = set((await db.execute(select(STORED.c.id).where(STORED.c.ended.is_(None)))).scalars())
        self._changed |= self._stored
        self._pending.set()

    def record(self, owner: str, event: str, actor: str, **details: Any) -> None:
        """Add an entry: `actor` did `event`, named RESOURCE_ACTION, to a resource of `owner`."""
        entry = {"owner": owner, "at": time.time(), "event": event, "details": {"actor": actor, **details}}
        self._audits.append(entry)
        self._pending.set()

    def checkpoint_created(self, checkpoint: Checkpoint, actor: str, **details: Any) -> None:
        """Record and count a new named checkpoint."""
        self.record(checkpoint.owner, "checkpoint_created", actor, **_details(checkpoint), **details)
        hour, session = int(checkpoint.created // 3600), self._session_id(checkpoint.run)
        self._usage[checkpoint.owner, hour, "checkpoint", checkpoint.base_model, session] += 1

    def checkpoint_read(self, checkpoint: Checkpoint, actor: str, purpose: str) -> None:
        """Record that `actor` read the contents of a checkpoint."""
        self.record(checkpoint.owner, "checkpoint_read", actor, **_details(checkpoint), purpose=purpose)

    def checkpoint_changed(self, checkpoint: Checkpoint, event: str, actor: str, **details: Any) -> None:
        """Record another event of a checkpoint, such as its deletion."""
        self.record(checkpoint.owner, event, actor, **_details(checkpoint), **details)

    def request_finished(self, line: Timeline) -> None:
        """Record the timing and the usage of a finished request."""
        track = line.request_id.rpartition(":")[0]
        record = self._store.find(Model, track) or self._store.find(SamplingSession, track)
        session, base_model = (record.session_id, record.base_model) if record else ("", line.model)
        tokens = line.tokens
        trained = sum(tokens.get(kind, 0) for kind in TRAINING_KINDS)
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
        quantities = {
            "training": trained,
            "sampling_prefill": tokens.get("prompt", 0) - cached,
            "sampling_prefill_cached": cached,
            "sampling_sample": tokens.get("sample", 0),
        }
        for kind, count in quantities.items():
            if count:
                self._usage[line.owner, line.finished // 3_600_000_000_000, kind, base_model, session] += count
        self._pending.set()

    async def run(self) -> None:
        """Write new entries and delete old ones, forever."""
        pruned = 0.0
        while True:
            await self._pending.wait()
            await self.flush()
            if pruned + PRUNE_S <= time.time():
                pruned = time.time()
                await self._store.write(self._delete_old)
            await asyncio.sleep(WRITE_INTERVAL_S)

    def _delete_old(self, db: Connection) -> None:
        """Delete old timings, entries and usage. Usage stays for as long as one query of it may ask for."""
        now = time.time()
        usage_before = now - max(self._retention_s, USAGE_S)
        db.execute(delete(SPANS).where(SPANS.c.ended < now - min(KEEP_SPANS_S, self._retention_s)))
        db.execute(delete(AUDIT).where(AUDIT.c.at < now - self._retention_s))
        db.execute(delete(USAGE).where(USAGE.c.hour < usage_before // 3600))
        db.execute(delete(STORED).where(STORED.c.ended < usage_before))

    async def flush(self) -> None:
        """Write all entries recorded so far. A cancellation takes effect after the write."""
        await uninterrupted(self._flush())

    async def _flush(self) -> None:
        async with self._writing:
            self._pending.clear()
            audits, spans, usage = self._audits, self._spans, self._usage
            self._audits, self._spans, self._usage = [], [], Counter()
            self._changed |= self._store.take_changed_checkpoints()
            changed, self._changed = self._changed, set()
            added, removed = self._storage_changes(changed)
            if not (audits or spans or usage or added or removed):
                return

            def write_all(db: Connection) -> None:
                _write(db, audits, spans, usage)
                _write_storage(db, added, removed)

            try:
                await self._store.write(write_all)
            except BaseException:
                self._audits, self._spans = audits + self._audits, spans + self._spans
                self._usage.update(usage)
                self._changed |= changed
                self._pending.set()
                raise
            self._stored |= {entry["id"] for entry in added}
            self._stored -= removed

    async def entries(self, owner: str, kind: str, day: date) -> list[dict[str, Any]]:
        """Entries of an owner and a day in UTC, oldest first; `kind` is a resource in the plural, or `all`."""
        await self.flush()
        start = datetime.combine(day, midnight(), UTC).timestamp()
        a = AUDIT.c
        query = select(a.at, a.event, a.details).where(a.owner == owner, a.at >= start, a.at < start + 86_400)
        if kind != "all":
            query = query.where(a.event.startswith(f"{kind.removesuffix('s')}_", autoescape=True))
        async with self._store.database.connect() as db:
            return [dict(entry) for entry in (await db.execute(query.order_by(a.at, a.id))).mappings()]

    def _storage_changes(self, changed: set[str]) -> tuple[list[dict[str, Any]], set[str]]:
        """(rows of new named checkpoints, ids of deleted ones) among those that changed since the last write."""
        entries = (self._store.find(Checkpoint, key) for key in changed)
        named = {entry.id: entry for entry in entries if entry and entry.kind != "ephemeral" and not entry.deleted}
        added = [
            {
                "id": entry.id,
                "owner": entry.owner,
                "session_id": self._session_id(entry.run),
                "base_model": entry.base_model,
                "size_bytes": entry.size_bytes,
                "begun": entry.created,
            }
            for entry in (named[key] for key in named.keys() - self._stored)
        ]
        return added, (changed & self._stored) - named.keys()

    def _session_id(self, run: str) -> str:
        model = self._store.find(Model, run)
        return model.session_id if model else ""


def _details(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"tinker_path": checkpoint.path, "model_id": checkpoint.run}


def _write(
    db: Connection,
    audits: Sequence[dict[str, Any]],
    spans: Sequence[dict[str, Any]],
    usage: Counter[tuple[str, int, str, str, str]],
) -> None:
    if audits:
        db.execute(AUDIT.insert(), audits)
    _ADD_SPANS.execute(db, [tuple(span[name] for name in _SPAN) for span in spans])
    _ADD_USAGE.execute(db, [(*key, count) for key, count in usage.items()])


def _write_storage(db: Connection, added: Sequence[dict[str, Any]], removed: set[str]) -> None:
    if added:
        db.execute(insert_into(db, STORED).on_conflict_do_nothing(), added)
    for key in removed:
        db.execute(update(STORED).where(STORED.c.id == key).values(ended=time.time()))
