"""tinker:// names <-> folders.

A checkpoint's folder carries its id, so a name can be given anew while an old session still samples from what it meant
before. Engines write the folders, whole or not at all; this file decides their names and how long they live.
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

TOLD = 5
"""Names in one warning."""
TTL_RANGE = (3600, 315_360_000)
"""One hour to ten years, as the protocol says."""
_NAME = re.compile(r"[A-Za-z0-9._=@+-]{1,200}")
_PATH = re.compile(r"tinker://(?P<run>[^/]+)/(?P<kind>weights|sampler_weights|external_weights)/(?P<name>[^/]+)")


class Checkpoints:
    """The saved adapters of one data folder."""

    def __init__(self, store: Store, root: Path) -> None:
        self._store = store
        self._root = root
        root.mkdir(parents=True, exist_ok=True)

    def folder(self, checkpoint_id: str) -> Path:
        """Where it is, or is to be, on disk; absolute."""
        return (self._root / checkpoint_id).resolve()

    def owned(self, path: str, owner: str) -> Checkpoint:
        """By its tinker:// path. Raises BadRequest for what is no such path, NotFound for what is not this owner's."""
        found = self.readable(path, owner)
        if found.owner != owner:
            raise _unknown(path)
        return found

    def readable(self, path: str, owner: str, lender: str | None = None) -> Checkpoint:
        """As `find`, but also what is published, and what belongs to the lender."""
        parts = _PATH.fullmatch(path)
        if parts is None:
            raise BadRequest(
                f"{path} is not a checkpoint's path.",
                "tinker://RUN/KIND/NAME, where KIND is weights, sampler_weights or external_weights.",
            )
        found = self.by_name(parts["run"], parts["kind"], parts["name"])
        if found is None or not (found.public or found.owner in (owner, lender)):
            raise _unknown(path)
        return found

    def by_name(self, run: str, kind: str, name: str) -> Checkpoint | None:
        """The checkpoint that has this name now."""
        found = (one for one in self._store.checkpoints_of_run(run) if (one.kind, one.name) == (kind, name))
        return next((one for one in found if not (one.deleted or _over(one))), None)

    def of_run(self, run: str) -> list[Checkpoint]:
        """A run's named checkpoints, newest first."""
        return _listed(self._store.checkpoints_of_run(run))

    def of_owner(self, owner: str) -> list[Checkpoint]:
        """An owner's named checkpoints, newest first."""
        return _listed(one for one in self._store.all(Checkpoint) if one.owner == owner)

    def published(self) -> dict[str, list[Checkpoint]]:
        """run -> its published checkpoints, newest first."""
        found: dict[str, list[Checkpoint]] = {}
        for one in _listed(one for one in self._store.all(Checkpoint) if one.public):
            found.setdefault(one.run, []).append(one)
        return found

    async def delete(self, checkpoint: Checkpoint) -> None:
        """Its name goes now; its folder when no living sampling session uses it."""
        if checkpoint.kind != "ephemeral" or self.in_use(checkpoint.id):
            await self._store.update(Checkpoint, checkpoint.id, deleted=True)
        if self.in_use(checkpoint.id):
            return
        await asyncio.to_thread(shutil.rmtree, self.folder(checkpoint.id), ignore_errors=True)
        await self._store.remove(checkpoint)  # last: the next start goes on with a deletion that this process dies in

    async def release(self, version: str) -> bool:
        """After a sampling session ended: whether nothing uses the version any more; then what is unnamed is gone."""
        if self.in_use(version):
            return False
        checkpoint = self._store.find(Checkpoint, version)
        if checkpoint is not None and (checkpoint.kind == "ephemeral" or checkpoint.deleted):
            await self.delete(checkpoint)
        return True

    def in_use(self, version: str) -> bool:
        """A living sampling session samples from it, or a model's inflight ones do."""
        users: list[SamplingSession | Model] = [
            one for one in self._store.all(SamplingSession) if one.version == version
        ]
        users += [one for one in self._store.all(Model) if one.inflight == version]
        sessions = (self._store.find(Session, one.session_id) for one in users)
        return any(session is not None and session.ended is None for session in sessions)

    async def expire(self) -> list[Checkpoint]:
        """Delete what is over its time, and say what that was."""
        over = [one for one in self._store.all(Checkpoint) if _over(one) and not one.deleted]
        for one in over:
            await self.delete(one)
        return over

    def next_expiry(self) -> float | None:
        """When the next one is over, in seconds since 1970."""
        return min(
            (one.expires for one in self._store.all(Checkpoint) if one.expires and not one.deleted), default=None
        )

    async def clean_up(self) -> None:
        """At start: what the process could not finish when it died, folders half written and deletions half done.

        A whole folder that the database does not know stays: another database may, or a newer copy of this one.
        """
        for one in self._store.all(Checkpoint):
            if (one.deleted or one.kind == "ephemeral") and not self.in_use(one.id):
                await self.delete(one)
        known = {one.id for one in self._store.all(Checkpoint)}
        warn_of_unknown_folders(
            self._root, [one for one in await complete_folders(self._root) if one.name not in known]
        )


def check_name(name: str) -> None:
    """Raises BadRequest unless the name can be the last part of a tinker:// path."""
    if not _NAME.fullmatch(name) or set(name) == {"."}:
        raise BadRequest(f"'{name}' cannot name a checkpoint.", "Use letters, digits and . _ = @ + - (at most 200).")


def check_ttl(ttl_seconds: int | None) -> None:
    """Raises BadRequest for a time to live that the protocol does not allow."""
    low, high = TTL_RANGE
    if ttl_seconds is not None and not low <= ttl_seconds <= high:
        raise BadRequest(f"ttl_seconds is {ttl_seconds}.", f"Give {low} to {high}, or leave it out to keep it.")


def expiry(ttl_seconds: int | None) -> float | None:
    """When a checkpoint that is given this much time from now is over."""
    return None if ttl_seconds is None else time.time() + ttl_seconds


async def complete_folders(root: Path) -> list[Path]:
    """The folders in a folder of the service's, once those that were being written (.NAME.…) are deleted."""
    found = [one for one in sorted(root.iterdir()) if one.is_dir()]
    for scratch in (one for one in found if one.name.startswith(".")):
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
    return [one for one in found if not one.name.startswith(".")]


def warn_of_unknown_folders(root: Path, folders: Sequence[Path]) -> None:
    """Warn of folders that are left alone because the database does not know them."""
    if folders:
        told = "%d folders in %s are unknown to this database and stay as they are: %s%s. If another --database, or a "
        told += "newer copy of this one, knows them, start with it; if none does, delete them."
        more = ", …" if len(folders) > TOLD else ""
        log.warning(told, len(folders), root, ", ".join(one.name for one in folders[:TOLD]), more)


def _unknown(path: str) -> NotFound:
    return NotFound(f"There is no checkpoint {path}.", "It may have been deleted, or its time is over.")


def _listed(found: Iterable[Checkpoint]) -> list[Checkpoint]:
    named = [one for one in found if one.kind != "ephemeral" and not (one.deleted or _over(one))]
    return sorted(named, key=lambda one: one.created, reverse=True)


def _over(checkpoint: Checkpoint) -> bool:
    return checkpoint.expires is not None and checkpoint.expires <= time.time()


class CheckpointCopies:
    """Makes copies, one after another: a client that repeats itself must not make two."""

    def __init__(self, store: Store, checkpoints: Checkpoints) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._making = asyncio.Lock()

    async def copy(self, source: Checkpoint, owner: str, asked: CopyBody, key: str | None) -> tuple[Checkpoint, bool]:
        """(the copy, whether it is new): the same key, or the same place in a session, gives the one made before."""
        if source.kind == "external_weights":
            raise BadRequest(f"{source.path} is for use elsewhere.", "Copy weights or sampler_weights.")
        async with self._making:
            session, place = self._place(owner, asked, key)
            run = f"{session.id}:train:{place}"
            made = self._checkpoints.by_name(run, source.kind, source.name)
            if made is not None and not made.made_by:
                return made, False
            if self._store.find(Model, run) is not None:
                raise BadRequest(f"Model {run} exists.", "Copy into the next model_seq_id.")
            model, made = _records(source, owner, session, run, asked.ttl_seconds)
            folder = self._checkpoints.folder
            await asyncio.to_thread(link_folder, folder(source.id), folder(made.id))
            await self._store.put(session, model, made)
            return made, True

    def _place(self, owner: str, asked: CopyBody, key: str | None) -> tuple[Session, int]:
        """The session that is to hold the copy, and its place in it."""
        if asked.session_id is not None:
            session = self._store.find(Session, asked.session_id)
            if session is None or session.owner != owner:
                raise NotFound(f"There is no session {asked.session_id}.", "Create one.")
            if asked.model_seq_id is None:
                raise BadRequest("copy_weights has a session_id and no model_seq_id.", "Send the next one.")
            return session, asked.model_seq_id
        if asked.destination_project_id is None:
            raise BadRequest("copy_weights says no place.", "Send destination_project_id, or a place in a session.")
        marked = f"copy:{key}" if key else None
        for session in self._store.all(Session):
            if marked is not None and (session.idempotency_key, session.owner) == (marked, owner):
                return session, 0
        now = time.time()
        made = Session(
            id=str(uuid.uuid4()),
            owner=owner,
            created=now,
            seen=now,
            idempotency_key=marked,
            project_id=asked.destination_project_id,
            ended="success",
        )
        return made, 0


def _records(
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
    made = replace(
        source,
        id=uuid.uuid4().hex,
        owner=owner,
        run=run,
        created=now,
        made_by="",
        public=False,
        expires=expiry(ttl_seconds),
    )
    return model, made
