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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from tinsmith.engine.base import SavedAdapter
from tinsmith.errors import BadRequest, NotFound
from tinsmith.plurals import counted
from tinsmith.service.budgets.orphans import UnrecordedFolders
from tinsmith.service.budgets.versions import VersionUse
from tinsmith.service.storage.object_copies import ObjectCopies
from tinsmith.service.storage.records import Checkpoint, Model, Session
from tinsmith.service.storage.store import Store
from tinsmith.service.wire.management_schemas import CopyBody

log = logging.getLogger(__name__)

LISTED_FOLDERS = 5
"""Folder names in one warning."""
TTL_RANGE = (3600, 315_360_000)
"""Seconds: one hour to ten years, as the protocol says."""
DELETING = ".deleting"
"""Ending of the name of an emptied folder whose row is to be deleted."""
LIVE = "@live"
"""In place of a checkpoint's name: the current weights of the model, which shadows can be made of."""
_NAME = re.compile(r"[A-Za-z0-9._=@+-]{1,200}")
_PATH = re.compile(r"tinker://(?P<run>[^/]+)/(?P<kind>weights|sampler_weights|external_weights)/(?P<name>[^/]+)")


class Checkpoints:
    """The checkpoints of a data folder."""

    def __init__(self, store: Store, root: Path, copies: ObjectCopies | None = None) -> None:
        self._store = store
        self._root = root
        self._copies = copies or ObjectCopies(store)
        root.mkdir(parents=True, exist_ok=True)
        self._unrecorded = UnrecordedFolders(root, store.name)
        self._deleting: set[str] = set()
        """Checkpoints whose files are being deleted, and whose row follows."""
        self.use = VersionUse()
        """When unnamed versions were sampled from."""

    def folder(self, checkpoint_id: str) -> Path:
        """Absolute path of a checkpoint's folder, which may not exist yet."""
        return (self._root / checkpoint_id).resolve()

    async def present(self, checkpoint: Checkpoint) -> Path:
        """A checkpoint's folder, fetched from the object store if it is not here. Waits while that is unavailable."""
        return await self._copies.ensure(self.folder(checkpoint.id), checkpoint.digest)

    async def source(self, checkpoint: Checkpoint) -> SavedAdapter:
        """What an engine reads the checkpoint from: its folder, or its object. Waits as `present`."""
        return await self._copies.source(self.folder(checkpoint.id), checkpoint.digest)

    async def link(self, checkpoint: Checkpoint, to: Path) -> str | None:
        """Give a checkpoint's files another name, so that it can be deleted. Returns the digest of their object."""
        return await self._copies.link(self.folder(checkpoint.id), checkpoint.digest, to)

    async def source_of(self, folder: Path) -> SavedAdapter:
        """What an engine reads a folder from that is no checkpoint's."""
        return await self._copies.source(folder, None)

    async def bring(self, folder: Path) -> None:
        """Have a folder here that an engine has just written and that is not to be published."""
        await self._copies.bring(folder)

    async def publish(self, checkpoint_id: str, *, waits: bool = True) -> str | None:
        """Store a written folder in the object store, if there is one, and return the digest for its record."""
        return await self._copies.publish(self.folder(checkpoint_id), waits=waits)

    @contextmanager
    def new_folder(self, checkpoint_id: str) -> Iterator[Path]:
        """The folder of a checkpoint that the block writes and whose row follows: call `recorded` after that."""
        with self._unrecorded.noted(checkpoint_id):
            yield self.folder(checkpoint_id)

    def recorded(self, checkpoint_id: str) -> None:
        """The checkpoint's row is stored: a start that does not find the row leaves the folder alone."""
        self._unrecorded.recorded(checkpoint_id)

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
            if (checkpoint.kind, checkpoint.name) == (kind, name) and self._is_listed(checkpoint):
                return checkpoint
        return None

    def of_run(self, run: str) -> list[Checkpoint]:
        """A run's named checkpoints, newest first."""
        return self._listed(self._store.checkpoints_of_run(run))

    def of_owner(self, owner: str) -> list[Checkpoint]:
        """An owner's named checkpoints, newest first."""
        return self._listed(checkpoint for checkpoint in self._store.all(Checkpoint) if checkpoint.owner == owner)

    def published(self) -> dict[str, list[Checkpoint]]:
        """Published checkpoints by run, newest first."""
        by_run: dict[str, list[Checkpoint]] = {}
        for checkpoint in self._listed(checkpoint for checkpoint in self._store.all(Checkpoint) if checkpoint.public):
            by_run.setdefault(checkpoint.run, []).append(checkpoint)
        return by_run

    def _listed(self, checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
        named = [each for each in checkpoints if each.kind != "ephemeral" and self._is_listed(each)]
        return sorted(named, key=lambda checkpoint: checkpoint.created, reverse=True)

    def _is_listed(self, checkpoint: Checkpoint) -> bool:
        return not (checkpoint.deleted or checkpoint.id in self._deleting or _is_expired(checkpoint))

    # Deleting.

    async def delete(self, checkpoint: Checkpoint) -> None:
        """Delete the name now, and the folder once no living sampling session uses it."""
        if self.in_use(checkpoint.id):
            await self._store.update(Checkpoint, checkpoint.id, deleted=True)
        else:
            await self.remove(checkpoint)

    async def remove(self, checkpoint: Checkpoint) -> None:
        """Delete files, then row: on a full disk the row can be deleted in the room that the files leave.

        An empty folder stays until the row is deleted, so that the next start continues where the process died.
        """
        if checkpoint.id in self._deleting:
            return
        self._deleting.add(checkpoint.id)
        try:
            emptied = self._root / f".{checkpoint.id}{DELETING}"
            await asyncio.to_thread(_empty_folder, self.folder(checkpoint.id), emptied)
            await self._store.remove(checkpoint)
            self.use.forget(checkpoint.id)
            with suppress(OSError):
                emptied.rmdir()
        finally:
            self._deleting.discard(checkpoint.id)

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
        sessions = (self._store.find(Session, user.session_id) for user in self._store.users_of(version))
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
        await asyncio.to_thread(
            self._unrecorded.delete_orphans, lambda name: self._store.find(Checkpoint, name) is not None
        )
        begun = {folder.name[1 : -len(DELETING)] for folder in self._root.glob(f".*{DELETING}")}
        for checkpoint in self._store.all(Checkpoint):
            unwanted = checkpoint.deleted or checkpoint.kind == "ephemeral"
            if checkpoint.id in begun or (unwanted and not self.in_use(checkpoint.id)):
                await self.remove(checkpoint)
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
            with self._checkpoints.new_folder(copy.id) as folder:
                digest = await self._checkpoints.link(source, folder)
            await self._store.put(session, model, replace(copy, digest=digest))
            self._checkpoints.recorded(copy.id)
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
    if not _NAME.fullmatch(name) or set(name) == {"."} or name == LIVE:
        raise BadRequest(
            f"'{name}' cannot name a checkpoint.", f"Use letters, digits and . _ = @ + - (at most 200), not {LIVE}."
        )


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
            "%s holds %s unknown to this database and left as they are: %s%s. If another --database, or a "
            "newer copy of this one, knows them, start with it; if none does, delete them.",
            root,
            counted(len(folders), "folder"),
            ", ".join(folder.name for folder in folders[:LISTED_FOLDERS]),
            ", …" if len(folders) > LISTED_FOLDERS else "",
        )


def _not_found(path: str) -> NotFound:
    return NotFound(f"There is no checkpoint {path}.", "It may have been deleted, or it has expired.")


def _empty_folder(folder: Path, emptied: Path) -> None:
    """Delete a folder's files and rename it."""
    with suppress(OSError):
        folder.rename(emptied)
    shutil.rmtree(folder, ignore_errors=True)
    for file in list(emptied.iterdir()) if emptied.is_dir() else []:
        file.unlink()


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
