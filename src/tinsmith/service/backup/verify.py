"""Verification of a data folder, also of a running server, or of a backup: every record has what it refers to.

A server changes its folder during the verification. Whatever seems wrong is looked at again in a later transaction, and
counts only if it is wrong each time.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from sqlalchemy import Row, select
from sqlalchemy.exc import DatabaseError

from tinsmith.errors import TinsmithError
from tinsmith.plurals import counted
from tinsmith.service.backup.manifest import MANIFEST, read_manifest
from tinsmith.service.backup.snapshot import ADAPTER, CONFIG, Snapshot, StoredFolder, open_snapshot
from tinsmith.service.storage.batch import REPLAYED
from tinsmith.service.storage.folder_lock import is_locked
from tinsmith.service.storage.payload_files import PAYLOADS_FOLDER, PayloadFiles
from tinsmith.service.storage.payloads import decode_operation
from tinsmith.service.storage.requests import payload_of, with_places
from tinsmith.service.storage.tables import REQUESTS

ATTEMPTS = 4
"""Looks at what seems wrong in the folder of a running server."""
PAUSE_S = 0.5
ROWS = 50
"""Requests that are read at a time: a payload may have megabytes."""


@dataclass(slots=True, kw_only=True)
class Check:
    """The result of one kind of check."""

    name: str
    checked: str = ""
    """What was checked, in words."""
    faults: dict[str, str] = field(default_factory=dict)
    """Subject -> what is wrong with it."""
    is_harmless: bool = False
    """Whether a fault costs space only."""


def verify(folder: Path, database: str | None = None) -> list[Check]:
    """Check a data folder or a backup. Raises ConfigError if it is neither, or of another version."""
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(folder)
        files = Check(name="manifest", checked=counted(len(manifest.files), "file"), faults=manifest.faults(folder))
        return [files, *_inspect(folder, None, is_live=False)]
    checks = _inspect(folder, database)
    for _ in range(ATTEMPTS - 1):
        if not (any(check.faults for check in checks) and is_locked(folder)):
            break
        time.sleep(PAUSE_S)
        later = {check.name: check.faults for check in _inspect(folder, database)}
        for check in checks:
            check.faults = {subject: text for subject, text in check.faults.items() if subject in later[check.name]}
    return checks


def _inspect(folder: Path, database: str | None, *, is_live: bool = True) -> list[Check]:
    """All checks of one transaction."""
    with open_snapshot(folder, database, is_live=is_live) as snapshot:
        return [
            _database(snapshot),
            _folders("checkpoints", folder, snapshot.saved()),
            _folders("journal", folder, snapshot.states()),
            _requests(snapshot, PayloadFiles(folder / PAYLOADS_FOLDER)),
            _unknown(folder, snapshot),
        ]


def _database(snapshot: Snapshot) -> Check:
    check = Check(name="database", checked=counted(sum(snapshot.counts().values()), "row"))
    if snapshot.db.dialect.name != "sqlite":
        return check  # PostgreSQL checks its pages when it reads them
    try:
        lines = [line for (line,) in snapshot.db.exec_driver_sql("PRAGMA integrity_check")]
    except DatabaseError as error:
        lines = [str(error.orig)]
    check.faults = {f"line {number}": line for number, line in enumerate(lines, 1) if line != "ok"}
    return check


def _folders(name: str, root: Path, folders: list[StoredFolder]) -> Check:
    faults = {folder.path: f"of {folder.record}: {fault}" for folder in folders if (fault := _fault(root, folder))}
    return Check(name=name, checked=counted(len(folders), "folder"), faults=faults)


def _fault(root: Path, stored: StoredFolder) -> str | None:
    """What is wrong with a folder; None if it can be loaded."""
    folder = root / stored.path
    if not folder.is_dir():
        return "the folder is missing" if stored.digest is None else None  # else the object store has it
    if not stored.is_complete(folder):
        return "the folder is not complete"
    try:
        shapes = {file.name: _shapes(file) for file in folder.glob("*.safetensors")}
        rank = json.loads((folder / CONFIG).read_text())["r"] if stored.names else stored.lora.rank
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        return f"a file cannot be read: {error}"
    if rank != stored.lora.rank:
        return f"the adapter has rank {rank} instead of {stored.lora.rank}"
    return _shape_fault(shapes.get(ADAPTER, {}), stored.lora.rank)


def _shape_fault(shapes: dict[str, list[int]], rank: int) -> str | None:
    """The matrices are pairs: A is (rank, in), B is (out, rank), of experts with a leading dimension."""
    for name, shape in shapes.items():
        other = name.replace(".lora_A.", ".lora_B.") if ".lora_A." in name else name.replace(".lora_B.", ".lora_A.")
        if other not in shapes:
            return f"{name} has no {other}"
        if shape[-2 if ".lora_A." in name else -1] != rank:
            return f"{name} has the shape {tuple(shape)} at rank {rank}"
    return None


def _shapes(file: Path) -> dict[str, list[int]]:
    """Shapes of the tensors of a file, whose header must agree with its length."""
    with safe_open(file, framework="numpy") as tensors:
        return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118 - not a mapping


def _requests(snapshot: Snapshot, files: PayloadFiles) -> Check:
    """Requests that a start runs, or replays after a captured state, can be decoded."""
    covered = {model.id: model.covered for model in snapshot.models if model.state != "ended"}
    r = REQUESTS.c
    query = with_places(select(r.id, r.model_id, r.seq, r.kind, r.state, r.payload))
    query = query.where(r.state.in_(("pending", "done")))
    check, count = Check(name="requests"), 0
    for row in snapshot.db.execute(query.execution_options(yield_per=ROWS)):
        replayed = row.kind in REPLAYED and row.seq > covered.get(row.model_id, row.seq)
        if row.state == "pending" or replayed:
            count += 1
            if fault := _payload_fault(row, files):
                check.faults[row.id] = fault
    check.checked = f"{count} to run or to replay"
    return check


def _payload_fault(row: Row[Any], files: PayloadFiles) -> str | None:
    if row.payload is None and row.segment is None:
        return "the payload is missing"
    try:
        decode_operation(row.kind, row.model_id, payload_of(row, files))
    except (OSError, TinsmithError, ValueError, TypeError, KeyError) as error:
        return f"the payload cannot be read: {error}"
    return None


def _unknown(root: Path, snapshot: Snapshot) -> Check:
    """Folders without a record. A server never deletes them."""
    recorded = {f"checkpoints/{checkpoint.id}" for checkpoint in snapshot.checkpoints}
    recorded |= {f"journal/{model.id.replace(':', '-')}" for model in snapshot.models}
    folders = [entry for name in ("checkpoints", "journal") for entry in root.glob(f"{name}/[!.]*/")]
    paths = sorted(folder.relative_to(root).as_posix() for folder in folders)
    faults = {path: "no record names it" for path in paths if path not in recorded}
    checked = f"{counted(len(faults), 'folder')} without a record"
    return Check(name="unknown", checked=checked, faults=faults, is_harmless=True)
