"""Checkpoints: their tinker:// paths, their folders, and how long they live.

A folder is named by the checkpoint's id, not by its path: a path can be overwritten while a sampling session still uses
the old weights. Engines write the folders, whole or not at all.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tinsmith.atomic import link_folder
from tinsmith.errors import BadRequest, NotFound
from tinsmith.service.storage.records import Checkpoint, Model, SamplingSession, Session
from tinsmith.service.storage.store import Store
from tinsmith.service.wire.schemas import CopyBody

log = logging.getLogger(__name__)

LISTED_FOLDERS = 5
"""Folder names in one warning."""
TTL_RANGE = (3600, 315_360_000)
"""Seconds: one hour to ten years, as the protocol says."""
_NAME = re.compile(r"[A-Za-z0-9._=@+-]{1,200}")
_PATH = re.compile(r"tinker://(?P<run>[^/]+)/(?P<kind>weights|sampler_weights|external_weights)/(?P<name>[^/]+)")


class Checkpoints:
    """The checkpoints of a data folder."""

    def __init__(self, store: Store, root: Path) -> None:
        self._store = store
        self._root = root
        root.mkdir(parents=True, exist_ok=True)

    def folder(self, checkpoint_id: str) -> Path:
        """Absolute path of a checkpoint's folder, which may not exist yet."""
        return (self._root / checkpoint_id).resolve()

    # Finding.

    def owned(self, path: str, owner: str) -> Checkpoint:
        """The owner's checkpoint at a tinker:// path. Raises BadRequest for an invalid path, NotFound."""
        checkpoint = self.readable(path, owner)
        if checkpoint.owner != owner:
            raise _not_found(path)
        return checkpoint

    def readable(self, path: str, owner: str, token_owner: str | None = None) -> Checkpoint:
        """The checkpoint at a path if it is the owner's, the token owner's or public. Raises BadRequest, NotFound."""
        parts = _PATH.fullmatch(path)
        if parts is None:
            raise BadRequest(
                f"{path} is not the path of a checkpoint.",
                "Give tinker://RUN/KIND/NAME, where KIND is weights, sampler_weights or external_weights.",
            )
        checkpoint = self.by_name(parts["run"], parts["kind"], parts["name"])
        if checkpoint is None or not (checkpoint.public or checkpoint.owner in (owner, token_owner)):
            raise _not_found(path)
        return checkpoint

    def by_name(self, run: str, kind: str, name: str) -> Checkpoint | None:
        """The checkpoint with this name, unless it is deleted or expired."""
        for checkpoint in self._store.checkpoints_of_run(run):
            if (checkpoint.kind, checkpoint.name) == (kind, name) and _is_listed(checkpoint):
                return checkpoint
        return None

    def of_run(self, run: str) -> list[Checkpoint]:
        """A run's named checkpoints, newest first."""
        return _listed(self._store.checkpoints_of_run(run))

    def of_owner(self, owner: str) -> list[Checkpoint]:
        """An owner's named checkpoints, newest first."""
        return _listed(checkpoint for checkpoint in self._store.all(Checkpoint) if checkpoint.owner == owner)

    def published(self) -> dict[str, list[Checkpoint]]:
        """Published checkpoints by run, newest first."""
        by_run: dict[str, list[Checkpoint]] = {}
        for checkpoint in _listed(checkpoint for checkpoint in self._store.all(Checkpoint) if checkpoint.public):
            by_run.setdefault(checkpoint.run, []).append(checkpoint)
        return by_run

    # Deleting.

    async def delete(self, checkpoint: Checkpoint) -> None:
        """Delete the name now, and the folder once no living sampling session uses it."""
        if checkpoint.kind != "ephemeral" or self.in_use(checkpoint.id):
            await self._store.update(Checkpoint, checkpoint.id, deleted=True)
        if self.in_use(checkpoint.id):
            return
        await asyncio.to_thread(shutil.rmtree, self.folder(checkpoint.id), ignore_errors=True)
        await self._store.remove(checkpoint)  # last: the next start continues a deletion in which the process dies

    async def release(self, version: str) -> bool:
        """Whether nothing uses a version any more. If so, the folder of an unnamed or deleted version is deleted."""
        if self.in_use(version):
            return False
        checkpoint = self._store.find(Checkpoint, version)
        if checkpoint is not None and (checkpoint.kind == "ephemeral" or checkpoint.deleted):
            await self.delete(checkpoint)
        return True

    def in_use(self, version: str) -> bool:
        """Whether a living sampling session uses the version, or may through its model's inflight version."""
        users: list[SamplingSession | Model] = [
            sampler for sampler in self._store.all(SamplingSession) if sampler.version == version
        ]
        users += [model for model in self._store.all(Model) if model.inflight == version]
        sessions = (self._store.find(Session, user.session_id) for user in users)
        return any(session is not None and session.ended is None for session in sessions)

    async def expire(self) -> list[Checkpoint]:
        """Delete expired checkpoints and return them."""
        expired = [
            checkpoint
            for checkpoint in self._store.all(Checkpoint)
            if _is_expired(checkpoint) and not checkpoint.deleted
        ]
        for checkpoint in expired:
            await self.delete(checkpoint)
        return expired

    def next_expiry(self) -> float | None:
        """When the next checkpoint expires, in seconds since 1970; None if none will."""
        expiries = (
            checkpoint.expires
            for checkpoint in self._store.all(Checkpoint)
            if checkpoint.expires and not checkpoint.deleted
        )
        return min(expiries, default=None)

    async def clean_up(self) -> None:
        """At start: remove incomplete folders and complete deletions that an earlier process began.

        A complete folder that the database does not know stays: another database, or a newer copy of this one, may.
        """
        for checkpoint in self._store.all(Checkpoint):
            if (checkpoint.deleted or checkpoint.kind == "ephemeral") and not self.in_use(checkpoint.id):
                await self.delete(checkpoint)
        ids = {checkpoint.id for checkpoint in self._store.all(Checkpoint)}
        folders = await complete_folders(self._root)
        warn_of_unknown_folders(self._root, [folder for folder in folders if folder.name not in ids])


class CheckpointCopies:
    """Copies checkpoints into a project or into another session.

    A copy shares its files with the source and is in a run of its own, which cannot be trained. A copy into a project
    has a session of its own; a copy into a session takes the place of one of its models. Copies are made one at a time,
    so that a client that repeats a request does not get two.
    """

    def __init__(self, store: Store, checkpoints: Checkpoints) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._lock = asyncio.Lock()

    async def copy(self, source: Checkpoint, owner: str, body: CopyBody, key: str | None) -> tuple[Checkpoint, bool]:
        """Return (the copy, whether it is new). The same key, or place in a session, returns the earlier copy."""
        if source.kind == "external_weights":
            raise BadRequest(f"{source.path} is for use elsewhere.", "Copy weights or sampler_weights.")
        async with self._lock:
            session, number = self._destination(owner, body, key)
            run = f"{session.id}:train:{number}"
            existing = self._checkpoints.by_name(run, source.kind, source.name)
            if existing is not None and not existing.made_by:
                return existing, False
            if self._store.find(Model, run) is not None:
                raise BadRequest(f"Model {run} exists.", "Copy into the next model_seq_id.")
            model, copy = _copied_records(source, owner, session, run, body.ttl_seconds)
            folder = self._checkpoints.folder
            await asyncio.to_thread(link_folder, folder(source.id), folder(copy.id))
            await self._store.put(session, model, copy)
            return copy, True

    def _destination(self, owner: str, body: CopyBody, key: str | None) -> tuple[Session, int]:
        """The session that will hold the copy, and the number of its model in the session."""
        if body.session_id is not None:
            session = self._store.find(Session, body.session_id)
            if session is None or session.owner != owner:
                raise NotFound(f"There is no session {body.session_id}.", "Create one.")
            if body.model_seq_id is None:
                raise BadRequest("copy_weights has a session_id and no model_seq_id.", "Send the next one.")
            return session, body.model_seq_id
        if body.destination_project_id is None:
            raise BadRequest(
                "copy_weights has no destination.", "Send destination_project_id, or session_id and model_seq_id."
            )
        idempotency_key = f"copy:{key}" if key else None
        for session in self._store.all(Session):
            if idempotency_key is not None and (session.idempotency_key, session.owner) == (idempotency_key, owner):
                return session, 0
        now = time.time()
        session = Session(
            id=str(uuid.uuid4()),
            owner=owner,
            created=now,
            seen=now,
            idempotency_key=idempotency_key,
            project_id=body.destination_project_id,
            ended="success",
        )
        return session, 0


def check_name(name: str) -> None:
    """Raise BadRequest unless the name can be the last part of a tinker:// path."""
    if not _NAME.fullmatch(name) or set(name) == {"."}:
        raise BadRequest(f"'{name}' cannot name a checkpoint.", "Use letters, digits and . _ = @ + - (at most 200).")


def check_ttl(ttl_seconds: int | None) -> None:
    """Raise BadRequest for a time to live outside of TTL_RANGE."""
    low, high = TTL_RANGE
    if ttl_seconds is not None and not low <= ttl_seconds <= high:
        raise BadRequest(
            f"ttl_seconds is {ttl_seconds}.", f"Give {low} to {high}, or leave it out to keep the checkpoint."
        )


def expiry(ttl_seconds: int | None) -> float | None:
    """The time at which a checkpoint with this time to live expires."""
    return None if ttl_seconds is None else time.time() + ttl_seconds


async def complete_folders(root: Path) -> list[Path]:
    """Delete the incomplete folders in `root` (.NAME.…) and return the others."""
    folders = [entry for entry in sorted(root.iterdir()) if entry.is_dir()]
    for incomplete in (folder for folder in folders if folder.name.startswith(".")):
        await asyncio.to_thread(shutil.rmtree, incomplete, ignore_errors=True)
    return [folder for folder in folders if not folder.name.startswith(".")]


def warn_of_unknown_folders(root: Path, folders: Sequence[Path]) -> None:
    """Log a warning about folders that stay because the database does not know them."""
    if folders:
        log.warning(
            "%d folders in %s are unknown to this database and stay as they are: %s%s. If another --database, or a "
            "newer copy of this one, knows them, start with it; if none does, delete them.",
            len(folders),
            root,
            ", ".join(folder.name for folder in folders[:LISTED_FOLDERS]),
            ", …" if len(folders) > LISTED_FOLDERS else "",
        )


def _not_found(path: str) -> NotFound:
    return NotFound(f"There is no checkpoint {path}.", "It may have been deleted, or it has expired.")


def _listed(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    named = [checkpoint for checkpoint in checkpoints if checkpoint.kind != "ephemeral" and _is_listed(checkpoint)]
    return sorted(named, key=lambda checkpoint: checkpoint.created, reverse=True)


def _is_listed(checkpoint: Checkpoint) -> bool:
    return not (checkpoint.deleted or _is_expired(checkpoint))


def _is_expired(checkpoint: Checkpoint) -> bool:
    return checkpoint.expires is not None and checkpoint.expires <= time.time()


def _copied_records(
    source: Checkpoint, owner: str, session: Session, run: str, ttl_seconds: int | None
) -> tuple[Model, Checkpoint]:
    now = time.time()
    model = Model(
        id=run,
        owner=owner,
        session_id=session.id,
        base_model=source.base_model,
        lora=source.lora,
        created=now,
        metadata={"copied_from": source.path},
        state="ended",
    )
    copy = replace(
        source,
        id=uuid.uuid4().hex,
        owner=owner,
        run=run,
        created=now,
        made_by="",
        public=False,
        expires=expiry(ttl_seconds),
    )
    return model, copy
