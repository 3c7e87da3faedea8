"""The records of a store in memory, with the indexes that its readers need. No I/O."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeVar

from sqlalchemy import Table

from tinsmith.service.storage.records import Checkpoint, CustomLoss, Model, SamplingSession, Session, StoredObject
from tinsmith.service.storage.tables import CHECKPOINTS, CUSTOM_LOSSES, MODELS, OBJECTS, SAMPLERS, SESSIONS

StoredRecord = Session | Model | SamplingSession | Checkpoint | CustomLoss | StoredObject
RecordT = TypeVar("RecordT", Session, Model, SamplingSession, Checkpoint, CustomLoss, StoredObject)
RecordKey = tuple[type[StoredRecord], str]
"""The kind and the id of a record."""
Changes = dict[RecordKey, StoredRecord | None]
"""Records that are inserted or replaced, None for those that are deleted."""
TABLES: dict[type[StoredRecord], Table] = {
    Session: SESSIONS,
    Model: MODELS,
    SamplingSession: SAMPLERS,
    Checkpoint: CHECKPOINTS,
    CustomLoss: CUSTOM_LOSSES,
    StoredObject: OBJECTS,
}


class Records:
    """All records by kind and id, oldest first."""

    def __init__(self) -> None:
        self._by_kind: dict[type[StoredRecord], dict[str, Any]] = {kind: {} for kind in TABLES}
        self._by_run: dict[str, dict[str, Checkpoint]] = {}
        """Run -> its checkpoints by id: every save looks up names of one run."""
        self._users: dict[str, dict[str, SamplingSession | Model]] = {}
        """Version -> the sampling sessions and models that refer to it, by id."""
        self.stored_bytes: Counter[str] = Counter()
        """Bytes of checkpoints by owner."""
        self.sampling_sessions: Counter[str] = Counter()
        """Number of sampling sessions by session."""
        self.changed_checkpoints: set[str] = set()
        """Ids of checkpoints that were added, replaced or removed since they were last taken."""

    def find(self, kind: type[RecordT], key: str) -> RecordT | None:
        """The record with this id, or None."""
        return self._by_kind[kind].get(key)

    def all(self, kind: type[RecordT]) -> list[RecordT]:
        """All records of a kind."""
        return list(self._by_kind[kind].values())

    def count(self, kind: type[StoredRecord]) -> int:
        """Number of records of a kind."""
        return len(self._by_kind[kind])

    def of_run(self, run: str) -> list[Checkpoint]:
        """A run's checkpoints."""
        return list(self._by_run.get(run, {}).values())

    def users_of(self, version: str) -> list[SamplingSession | Model]:
        """The sampling sessions that sample from a version, and the models whose inflight version it is."""
        return list(self._users.get(version, {}).values())

    def apply(self, changes: Changes) -> None:
        """Insert, replace or, if None, remove records."""
        for (kind, key), record in changes.items():
            previous = self._by_kind[kind].get(key)
            self._index(previous, record)
            if record is not None:
                self._by_kind[kind][key] = record
            elif previous is not None:
                del self._by_kind[kind][key]

    def _index(self, previous: StoredRecord | None, record: StoredRecord | None) -> None:
        """Update the indexes for a record that takes the place of `previous`."""
        for entry, sign in ((previous, -1), (record, 1)):
            if isinstance(entry, Checkpoint):
                self.changed_checkpoints.add(entry.id)
                self.stored_bytes[entry.owner] += sign * entry.size_bytes
            elif isinstance(entry, SamplingSession):
                self.sampling_sessions[entry.session_id] += sign
                if not self.sampling_sessions[entry.session_id]:
                    del self.sampling_sessions[entry.session_id]
        if isinstance(record, Checkpoint):  # a replaced one keeps its place
            self._by_run.setdefault(record.run, {})[record.id] = record
        elif isinstance(previous, Checkpoint):
            _discard(self._by_run, previous.run, previous.id)
        if isinstance(previous, SamplingSession | Model) and (version := _version_of(previous)) is not None:
            _discard(self._users, version, previous.id)
        if isinstance(record, SamplingSession | Model) and (version := _version_of(record)) is not None:
            self._users.setdefault(version, {})[record.id] = record


def _version_of(record: SamplingSession | Model) -> str | None:
    return record.version if isinstance(record, SamplingSession) else record.inflight


def _discard(index: dict[str, dict[str, Any]], key: str, record_id: str) -> None:
    entries = index.get(key)
    if entries is not None:
        entries.pop(record_id, None)
        if not entries:
            del index[key]
