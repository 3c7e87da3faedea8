"""Copies of checkpoints: of the same files, in a run of their own that cannot be trained on.

A copy into a project gets a session of its own; a copy into a session takes the place of one of its models.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import replace

from tinsmith.engine.folders import linked
from tinsmith.errors import BadRequest, NotFound
from tinsmith.service.bodies_manage import CopyBody
from tinsmith.service.checkpoints import Checkpoints, expiry
from tinsmith.service.records import Checkpoint, Model, Session
from tinsmith.service.store import Store


class Copies:
    """Makes copies, one after another: a client that repeats itself must not make two."""

    def __init__(self, store: Store, checkpoints: Checkpoints) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._making = asyncio.Lock()

    async def make(self, source: Checkpoint, owner: str, asked: CopyBody, key: str | None) -> tuple[Checkpoint, bool]:
        """(the copy, whether it is new): the same key, or the same place in a session, gives the one made before."""
        if source.kind == "external_weights":
            raise BadRequest(f"{source.path} is for use elsewhere.", "Copy weights or sampler_weights.")
        async with self._making:
            session, place = self._place(owner, asked, key)
            run = f"{session.id}:train:{place}"
            made = self._checkpoints.named(run, source.kind, source.name)
            if made is not None and not made.made_by:
                return made, False
            if self._store.find(Model, run) is not None:
                raise BadRequest(f"Model {run} exists.", "Copy into the next model_seq_id.")
            model, made = _records(source, owner, session, run, asked.ttl_seconds)
            folder = self._checkpoints.folder
            await asyncio.to_thread(linked, folder(source.id), folder(made.id))
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
