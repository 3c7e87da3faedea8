"""Traces of a session's requests in Chrome's JSON trace format, for https://ui.perfetto.dev.

Each model and each sampling session is a track. Waiting requests and running samples overlap, so they are asynchronous
spans; the training requests of a model run one after another and are complete events.
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
"""Longest time that one call waits for the file; the client repeats the call."""


class TraceExporter:
    """Writes the traces of one data folder."""

    def __init__(self, store: Store, audit_log: AuditLog, root: Path) -> None:
        self._store = store
        self._audit_log = audit_log
        self._root = root
        self._building: dict[str, asyncio.Task[str]] = {}

    def file(self, name: str) -> Path:
        """Path of a trace, which may have been deleted."""
        return self._root / name

    async def export(self, session: Session) -> str | None:
        """Write a session's trace. Returns the file's name, or None if it is not ready yet: repeat the call."""
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
    title = f"session {session.display_name or session.id}"
    yield {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": title}}
    for track, number in tracks.items():
        name = track.removeprefix(f"{session.id}:")
        yield {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": name}}
    for span in spans:
        yield from _request_events(span, {"pid": 1, "tid": tracks[span["track"]]})


def _request_events(span: dict[str, Any], place: dict[str, int]) -> Iterator[dict[str, Any]]:
    details = {key: span[key] for key in ("id", "state", "base_model", "tokens", "prompt_tokens", "cached_tokens")}
    yield from _async_span(
        f"{span['kind']} waits", span["id"], span["submitted"], span["begun"], {**place, "cat": "queue"}, {}
    )
    if span["kind"] == "sample":
        yield from _async_span("sample", span["id"], span["begun"], span["ended"], {**place, "cat": "sample"}, details)
        return
    duration = _micros(span["ended"] - span["begun"])
    event = {"ph": "X", "name": span["kind"], "cat": "training", "ts": _micros(span["begun"]), "dur": duration}
    yield {**event, **place, "args": details}


def _async_span(
    name: str, key: str, begun: float, ended: float, place: dict[str, Any], details: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Begin and end events of a span that may overlap with others of its track."""
    yield {"ph": "b", "name": name, "id": key, "ts": _micros(begun), "args": details, **place}
    yield {"ph": "e", "name": name, "id": key, "ts": _micros(ended), **place}


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 1)
