"""Usage reports for the billing calls of the protocol: usage by hour, and current storage. Prices are null.

Tokens are those of finished requests. Storage is exact: the bytes of each named checkpoint from its creation to its
deletion. A gigabyte is 10^9 bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import numpy as np
from sqlalchemy import or_, select

from tinsmith.errors import BadRequest
from tinsmith.service.observability.audit import AuditLog
from tinsmith.service.responses import DEFAULT_PROJECT, metadata_texts, rfc3339
from tinsmith.service.storage.records import Checkpoint, Model, Session
from tinsmith.service.storage.store import Store
from tinsmith.service.storage.tables import STORED, USAGE
from tinsmith.service.tenancy.signing import urn

HOUR = 3600
WINDOW_HOURS = 14 * 24
_CACHED = "sampling_prefill_cached"


class Usage:
    """Creates usage reports from the counters that the audit log writes."""

    def __init__(self, store: Store, audit_log: AuditLog) -> None:
        self._store = store
        self._audit_log = audit_log

    async def events(self, owner: str, starting_on: datetime, ending_before: datetime) -> dict[str, Any]:
        """Usage of each hour in a window, ordered by hour, then by tokens in descending order. Raises BadRequest."""
        first, end = _window(starting_on, ending_before)
        await self._audit_log.flush()
        u, s = USAGE.c, STORED.c
        used = select(USAGE).where(u.owner == owner, u.hour >= first, u.hour < end)
        still_stored = or_(s.ended.is_(None), s.ended > first * HOUR)
        stored = select(STORED).where(s.owner == owner, s.begun < end * HOUR, still_stored)
        async with self._store.database.connect() as db:
            rows = [dict(record) for record in (await db.execute(used)).mappings()]
            spans = [dict(record) for record in (await db.execute(stored)).mappings()]
        data = [self._event(owner, row["hour"], row["base_model"], _info(row), row["session_id"]) for row in rows]
        for (base_model, project), hours in self._storage(spans, first, end).items():
            for hour in np.flatnonzero(hours).tolist():
                info = {"type": "storage", "free": False, "gigabyte_hours": float(hours[hour]) / 1e9}
                data.append(self._event(owner, first + hour, base_model, info, None, project))
        data.sort(key=lambda record: (record["bucket_start"], -record["event_info"].get("token_count", -1)))
        return {"data": data, "sessions": self._sessions(data), "cost_data_through": None}

    def stored(self, owner: str, project_id: str | None) -> dict[str, Any]:
        """Number and size of the current named checkpoints by project."""
        results: dict[str, list[int]] = {}
        for record in self._store.all(Checkpoint):
            if record.owner == owner and record.kind != "ephemeral" and not record.deleted:
                model = self._store.find(Model, record.run)
                results.setdefault(self._project(model.session_id if model else ""), []).append(record.size_bytes)
        data = [
            {
                "project_id": project,
                "org_user_urn": urn(owner),
                "user_email": None,
                "user_name": owner,
                "checkpoint_count": len(sizes),
                "size_bytes": sum(sizes),
                "size_gigabytes": sum(sizes) / 1e9,
                "estimated_monthly_cost_usd": None,
            }
            for project, sizes in sorted(results.items())
            if project_id is None or project == project_id
        ]
        return {"effective_rate_usd_per_gigabyte_month": None, "data": data}

    def _event(
        self, owner: str, hour: int, base_model: str, info: dict[str, Any], session: str | None, project: str = ""
    ) -> dict[str, Any]:
        return {
            "bucket_start": rfc3339(hour * HOUR),
            "bucket_end": rfc3339((hour + 1) * HOUR),
            "base_model": base_model,
            "user_id": urn(owner),
            "user_name": owner,
            "session_id": session or None,
            "project_id": project or self._project(session or ""),
            "estimated_cost_usd": None,
            "effective_rate_usd_per_million_tokens": None,
            "effective_rate_usd_per_gigabyte_month": None,
            "event_info": info,
        }

    def _storage(self, spans: Iterable[dict[str, Any]], first: int, end: int) -> dict[tuple[str, str], np.ndarray]:
        """Map (base model, project) to the byte-hours of each hour of the window."""
        now = time.time()
        results: dict[tuple[str, str], np.ndarray] = {}
        for record in spans:
            place = (record["base_model"], self._project(record["session_id"]))
            hours = results.setdefault(place, np.zeros(end - first + 1))
            begun = max(record["begun"] / HOUR - first, 0.0)
            ended = min((record["ended"] or now) / HOUR - first, float(end - first))
            # Byte-hours up to the end minus byte-hours up to the start; each is whole hours plus a part of one.
            for until, sign in ((ended, 1), (begun, -1)):
                hours[: int(until)] += sign * record["size_bytes"]
                hours[int(until)] += sign * (until % 1) * record["size_bytes"]
        return results

    def _project(self, session_id: str) -> str:
        session = self._store.find(Session, session_id)
        return (session.project_id if session else None) or DEFAULT_PROJECT

    def _sessions(self, data: Iterable[dict[str, Any]]) -> dict[str, Any]:
        results = (
            self._store.find(Session, key) for key in {event["session_id"] for event in data if event["session_id"]}
        )
        return {
            session.id: {"user_metadata": metadata_texts(session.metadata)}
            for session in results
            if session is not None
        }


def _info(row: dict[str, Any]) -> dict[str, Any]:
    kind, quantity = row["kind"], row["quantity"]
    if kind == "checkpoint":
        return {"type": kind, "count": quantity}
    if kind.startswith("sampling_prefill"):
        return {"type": "sampling_prefill", "cached": kind == _CACHED, "token_count": quantity}
    return {"type": kind, "token_count": quantity}


def _window(starting_on: datetime, ending_before: datetime) -> tuple[int, int]:
    """(first hour, hour after the last). Raises BadRequest unless the window has whole hours and at most 14 days."""
    times = {"starting_on": starting_on, "ending_before": ending_before}
    for name, value in times.items():
        if value.tzinfo is None or value.timestamp() % HOUR:
            raise BadRequest(
                f"{name} is {value.isoformat()}.", "Give whole hours in UTC, such as 2026-07-13T05:00:00Z."
            )
    first, end = (int(value.timestamp() // HOUR) for value in times.values())
    if not first < end <= first + WINDOW_HOURS:
        raise BadRequest(
            "The window is empty or too long.", "Give up to 14 days, with starting_on before ending_before."
        )
    if first * HOUR > time.time():
        raise BadRequest(
            f"starting_on is {starting_on.isoformat()}, which is in the future.", "Give a time in the past."
        )
    return first, end
