"""A session's requests on a line of time, as a file that https://ui.perfetto.dev opens (Chrome's JSON trace format).

Each model and each sampling session is a track. A request that waits and a sample that runs are drawn as spans of their
own, since they overlap; what a model's engine does comes one after another.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import select

from tinsmith.atomic import atomic_write
from tinsmith.service.observability.audit import AuditLog
from tinsmith.service.storage.records import Session
from tinsmith.service.storage.store import Store
from tinsmith.service.storage.tables import SPANS
from tinsmith.service.tenancy.signing import LINK_S

HOLD_S = 20.0
"""Longest wait for the file in one call; the client repeats the call."""


class TraceExporter:
    """The files of one data folder."""

    def __init__(self, store: Store, audit_log: AuditLog, root: Path) -> None:
        self._store = store
        self._audit_log = audit_log
        self._root = root
        self._building: dict[str, asyncio.Task[str]] = {}

    def file(self, name: str) -> Path:
        """Where a trace is while it may be fetched."""
        return self._root / name

    async def export(self, session: Session) -> str | None:
        """The name of the file; None if it is not ready yet, and the call is to be repeated."""
        task = self._building.get(session.id)
        if task is None:
            task = self._building[session.id] = asyncio.create_task(self._build(session))
        done, _ = await asyncio.wait({task}, timeout=HOLD_S)
        if not done:
            return None
        self._building.pop(session.id, None)
        return task.result()

    async def _build(self, session: Session) -> str:
        await self._audit_log.flush()
        query = select(SPANS).where(SPANS.c.session_id == session.id).order_by(SPANS.c.begun)
        async with self._store.database.connect() as db:
            spans = [dict(span) for span in (await db.execute(query)).mappings()]
        return await asyncio.to_thread(self._write, session, spans)

    def _write(self, session: Session, spans: Sequence[dict[str, Any]]) -> str:
        self._root.mkdir(exist_ok=True)
        for old in self._root.iterdir():
            if old.stat().st_mtime < time.time() - LINK_S:
                old.unlink(missing_ok=True)
        name = f"{session.id}-{time.time_ns()}.json"
        trace = {"displayTimeUnit": "ms", "traceEvents": list(_events(session, spans))}
        atomic_write(self.file(name), json.dumps(trace).encode())
        return name


def _events(session: Session, spans: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    tracks = {track: number for number, track in enumerate(dict.fromkeys(span["track"] for span in spans), 1)}
    named = f"session {session.display_name or session.id}"
    yield {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": named}}
    for track, number in tracks.items():
        name = track.removeprefix(f"{session.id}:")
        yield {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": name}}
    for span in spans:
        yield from _request(span, {"pid": 1, "tid": tracks[span["track"]]})


def _request(span: dict[str, Any], place: dict[str, int]) -> Iterator[dict[str, Any]]:
    details = {key: span[key] for key in ("id", "state", "base_model", "tokens", "prompt_tokens", "cached_tokens")}
    yield from _async_span(
        f"{span['kind']} waits", span["id"], span["submitted"], span["begun"], {**place, "cat": "queue"}, {}
    )
    if span["kind"] == "sample":
        yield from _async_span("sample", span["id"], span["begun"], span["ended"], {**place, "cat": "sample"}, details)
        return
    length = _micros(span["ended"] - span["begun"])
    yield {"ph": "X", "name": span["kind"], "cat": "training", "ts": _micros(span["begun"]), "dur": length, **place} | {
        "args": details
    }


def _async_span(
    name: str, key: str, begun: float, ended: float, place: dict[str, Any], details: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """A span that may overlap with others of its track."""
    yield {"ph": "b", "name": name, "id": key, "ts": _micros(begun), "args": details, **place}
    yield {"ph": "e", "name": name, "id": key, "ts": _micros(ended), **place}


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 1)
