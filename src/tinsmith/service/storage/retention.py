"""What a store removes with time: results, requests that a replay needs no more, and the records of ended sessions.

Rows are removed in pieces, so that no request waits for a long transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, Select, and_, case, delete, func, or_, select, update

from tinsmith.service.storage.memory import StoredRecord
from tinsmith.service.storage.records import Model, SamplingSession, Session
from tinsmith.service.storage.store import Store
from tinsmith.service.storage.tables import MODELS, PAYLOADS, REQUESTS

UNFETCHED_S = 86_400.0
"""Least time that a result of training stays which nobody has fetched: a laptop may sleep overnight."""
PIECE = 5000
"""Rows of one transaction."""
_ANY_SEQ = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How long a store keeps what has ended, in seconds."""

    fetched_s: float
    """Results, from their last fetch."""
    ended_s: float
    """Records of ended sessions, from their end."""

    @property
    def unfetched_s(self) -> float:
        """Results that were never fetched, from the end of their request."""
        return max(self.fetched_s, UNFETCHED_S)


async def prune(store: Store, retention: Retention, now: float) -> None:
    """Remove old results and requests, and give their space back to the disk."""
    is_old = _is_old(now, retention)
    await _in_pieces(store, lambda db: _delete_requests(db, is_old))
    await _in_pieces(store, lambda db: _delete_results(db, is_old))
    await store.compact()


async def remove_ended(store: Store, retention: Retention, now: float) -> list[Session]:
    """Remove the records of sessions that ended long ago, and return the sessions.

    A model with named checkpoints stays, and its session with it.
    """
    records = ended_records(store, now - retention.ended_s)
    for start in range(0, len(records), PIECE):
        await store.remove(*records[start : start + PIECE])
    return [record for record in records if isinstance(record, Session)]


def ended_records(store: Store, before: float) -> list[StoredRecord]:
    """Records of sessions that ended before a time: what refers to another record comes first."""
    ended = {session.id for session in store.all(Session) if session.ended is not None and session.seen < before}
    if not ended:
        return []
    models = [model for model in store.all(Model) if model.session_id in ended]
    lasting = {model.id for model in models if model.state != "ended" or store.checkpoints_of_run(model.id)}
    lasting_sessions = {model.session_id for model in models if model.id in lasting}
    samplers = [sampler for sampler in store.all(SamplingSession) if sampler.session_id in ended]
    sessions = [session for session in store.all(Session) if session.id in ended - lasting_sessions]
    return [*samplers, *(model for model in models if model.id not in lasting), *sessions]


def _is_old(now: float, retention: Retention) -> ColumnElement[bool]:
    r = REQUESTS.c
    fetched = r.fetched < now - retention.fetched_s
    return and_(r.done < now - retention.fetched_s, or_(fetched, r.done < now - retention.unfetched_s))


async def _in_pieces(store: Store, work: Callable[[Connection], int]) -> None:
    while await store.run(work) == PIECE:
        pass


def _delete_requests(db: Connection, is_old: ColumnElement[bool]) -> int:
    """Delete requests that have no result any more and that no replay needs.

    A living model keeps the request up to which its state is captured, which tells a later process which seq_ids were
    used; of an ended model nothing stays.
    """
    covered = case((MODELS.c.state == "ended", _ANY_SEQ), else_=MODELS.c.covered)
    of_model = select(covered).where(MODELS.c.id == REQUESTS.c.model_id).scalar_subquery()
    old = select(REQUESTS.c.id).where(
        is_old, REQUESTS.c.state != "pending", REQUESTS.c.seq < func.coalesce(of_model, _ANY_SEQ)
    )
    ids = _first(db, old)
    if ids:
        db.execute(delete(PAYLOADS).where(PAYLOADS.c.id.in_(ids)))
        db.execute(delete(REQUESTS).where(REQUESTS.c.id.in_(ids)))
    return len(ids)


def _delete_results(db: Connection, is_old: ColumnElement[bool]) -> int:
    """Delete the results of the requests that stay."""
    ids = _first(db, select(REQUESTS.c.id).where(is_old, REQUESTS.c.state != "pending", REQUESTS.c.body.is_not(None)))
    if ids:
        db.execute(update(REQUESTS).where(REQUESTS.c.id.in_(ids)).values(body=None))
    return len(ids)


def _first(db: Connection, query: Select[str]) -> Sequence[str]:
    return db.scalars(query.limit(PIECE)).all()
