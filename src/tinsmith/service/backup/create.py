"""Backup of a data folder and its database into a folder, while a server uses them or not.

The database is read in one transaction, and the folders that it refers to are hard-linked meanwhile. Where the server
has deleted one since, a newer transaction takes the place of that one: nothing waits, in the server or for it.
Payloads in files become part of their rows.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from tinsmith.atomic import link_file
from tinsmith.checksums import checksum
from tinsmith.errors import ConfigError
from tinsmith.service.backup.manifest import BackupManifest, FileEntry, files_of, read_manifest
from tinsmith.service.backup.snapshot import (
    Snapshot,
    StoredFolder,
    open_snapshot,
    require_database,
)
from tinsmith.service.storage.database import head_revision
from tinsmith.service.storage.payload_files import PAYLOADS_FOLDER, PayloadFiles, held

SINGLE_FILES = ("api-key", "signing-key", "samples")
"""Files of a data folder that no record refers to."""
PATIENCE_S = 10.0
"""Time after which a folder that every transaction refers to, and that is not there, counts as missing."""
LIMIT_S = 120.0
"""Time for a transaction whose folders are all there."""
RETRY_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupResult:
    """A new backup."""

    manifest: BackupManifest
    size_bytes: int
    reused: int
    """Files that the destination had before."""


def back_up(data: Path, database: str | None, destination: Path) -> BackupResult:
    """Write a backup, which replaces the earlier backup in `destination` at the end.

    Raises ConfigError if there is no database, if `destination` holds anything but a backup, or if it cannot be
    written.
    """
    require_database(data, database)
    destination = destination.absolute()
    previous = _previous(data, destination)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive_folder(destination.with_name(f".{destination.name}.writing")) as folder:
            with _staging(data) as staging:
                manifest = _collect(data, database, staging)
                reused = _copy(staging, folder, destination, previous, manifest)
            manifest.write(folder)
            os.sync()  # once, in place of a sync for each file
            _replace(destination, folder)
    except OSError as error:
        reason = f"{error.strerror} ({error.filename})" if error.filename else str(error.strerror)
        raise ConfigError(f"The backup cannot be written: {reason}.", "Free space, or name another folder.") from error
    size = sum(entry.size for entry in manifest.files.values())
    return BackupResult(manifest=manifest, size_bytes=size, reused=reused)


def _previous(data: Path, destination: Path) -> BackupManifest | None:
    """The manifest of the earlier backup in `destination`. Raises ConfigError if it cannot be replaced."""
    if destination.is_mount() or destination.is_relative_to(data.absolute()):
        raise ConfigError(f"{destination} cannot be replaced as a whole.", f"Name a folder in it: {destination}/NAME.")
    if not destination.exists() or (destination.is_dir() and not any(destination.iterdir())):
        return None
    return read_manifest(destination)


# Collecting.


def _collect(data: Path, database: str | None, staging: Path) -> BackupManifest:
    """Link the folders and copy the database and the single files. Returns the manifest without files."""
    missing_since: dict[str, float] = {}
    end = time.monotonic() + LIMIT_S
    while True:
        with held(data / PAYLOADS_FOLDER), open_snapshot(data, database) as snapshot:
            folders = snapshot.folders()
            now = time.monotonic()
            missing = [folder.path for folder in folders if not _link_folder(data, staging, folder)]
            missing_since = {path: missing_since.get(path, now) for path in missing}
            if all(now - since >= PATIENCE_S for since in missing_since.values()):
                _remove_others(staging, {folder.path for folder in folders})
                return _read_rest(snapshot, data, database, staging, missing)
        if now > end:
            raise ConfigError(
                f"The server replaces folders faster than they can be linked; the last was {missing[0]}.",
                "Raise its capture_every, or back up when it is less busy.",
            )
        time.sleep(RETRY_S)


def _link_folder(data: Path, staging: Path, folder: StoredFolder) -> bool:
    """Link a folder's files. False if the folder is gone, or going; True without any if the object store has it."""
    to = staging / folder.path
    if to.is_dir():
        return True
    if folder.digest is not None and not (data / folder.path).is_dir():
        return True
    to.mkdir(parents=True)
    try:
        for file in (data / folder.path).iterdir():
            link_file(file, to / file.name)
    except FileNotFoundError:
        pass
    if folder.is_complete(to):
        return True
    shutil.rmtree(to)
    return False


def _remove_others(staging: Path, paths: set[str]) -> None:
    """Remove folders of earlier transactions that the last one does not refer to."""
    for folder in [*staging.glob("checkpoints/*"), *staging.glob("journal/*/*")]:
        if folder.relative_to(staging).as_posix() not in paths:
            shutil.rmtree(folder)


def _read_rest(
    snapshot: Snapshot, data: Path, database: str | None, staging: Path, missing: list[str]
) -> BackupManifest:
    created = datetime.now(UTC).isoformat(timespec="seconds")
    snapshot.copy_database(staging, PayloadFiles(data / PAYLOADS_FOLDER))
    for name in SINGLE_FILES:
        if (data / name).is_file():
            shutil.copy2(data / name, staging / name)
    return BackupManifest(
        created=created,
        tinsmith=version("tinsmith"),
        schema=str(head_revision()),
        database="sqlite" if database is None else "postgresql",
        counts=snapshot.counts(),
        missing=missing,
    )


# The destination.


@contextmanager
def _staging(data: Path) -> Iterator[Path]:
    """The folder that gets hard links: in the data folder, since the destination may be on another file system."""
    for stale in data.glob(".backup-*"):
        with suppress(ConfigError), _exclusive_folder(stale):  # removes it, unless another backup uses it
            pass
    with _exclusive_folder(Path(tempfile.mkdtemp(prefix=".backup-", dir=data))) as staging:
        yield staging


@contextmanager
def _exclusive_folder(folder: Path) -> Iterator[Path]:
    """An empty folder of this process alone, removed after the block unless it was renamed.

    Raises ConfigError if another process uses it.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for entry in folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        try:
            yield folder
        finally:
            if folder.is_dir() and os.path.samestat(folder.stat(), os.fstat(descriptor)):
                shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError as error:
        raise ConfigError(f"Another backup writes {folder}.", "Wait for its end.") from error
    finally:
        os.close(descriptor)


def _copy(
    staging: Path, folder: Path, destination: Path, previous: BackupManifest | None, manifest: BackupManifest
) -> int:
    """Link or copy the files into the new backup, and enter them in its manifest.

    Unchanged ones are linked from the earlier backup, and are not read. Returns their number.
    """
    reused, entries = 0, previous.files if previous is not None else {}
    for path in files_of(staging):
        source, target, earlier = staging / path, folder / path, destination / path
        target.parent.mkdir(parents=True, exist_ok=True)
        stat, entry = source.stat(), entries.get(path)
        if entry is not None and entry.is_of(stat) and earlier.is_file():
            link_file(earlier, target)
            reused += 1
        else:
            link_file(source, target)
            entry = FileEntry(checksum(target), stat.st_mtime_ns)
        manifest.files[path] = entry
    return reused


def _replace(destination: Path, folder: Path) -> None:
    """Move the new backup into place. The earlier one is complete under one of two names at any instant."""
    earlier = destination.with_name(f".{destination.name}.replaced")
    shutil.rmtree(earlier, ignore_errors=True)
    if destination.exists():
        destination.rename(earlier)
    folder.rename(destination)
    os.sync()
    shutil.rmtree(earlier, ignore_errors=True)
