"""The manifest of a backup: what it was made of, and the size and SHA-256 of each of its files."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tinsmith.atomic import atomic_write
from tinsmith.checksums import Checksum, checksum
from tinsmith.errors import ConfigError
from tinsmith.plurals import counted

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a backup. `mtime_ns` tells an unchanged file from a new one, as its size does."""

    checksum: Checksum
    mtime_ns: int

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.checksum.bytes

    def is_of(self, stat: os.stat_result) -> bool:
        """Whether a file with this status is unchanged."""
        return (self.size, self.mtime_ns) == (stat.st_size, stat.st_mtime_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupManifest:
    """The contents of a backup."""

    created: str
    """When the database was read: RFC 3339, UTC."""
    tinsmith: str
    """Version of the program that wrote it."""
    schema: str
    """Version of the tables."""
    database: str
    """sqlite or postgresql: where the rows were; a backup holds them in SQLite."""
    counts: dict[str, int] = field(default_factory=dict)
    """Rows of each table."""
    missing: list[str] = field(default_factory=list)
    """Folders that records refer to and that were not there."""
    files: dict[str, FileEntry] = field(default_factory=dict)
    """By path relative to the backup."""
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write it as the manifest of a folder."""
        atomic_write(folder / MANIFEST, json.dumps(asdict(self), indent=1).encode())

    def faults(self, folder: Path) -> dict[str, str]:
        """Files that differ from the manifest, with what is wrong. Reads every file."""
        present = set(files_of(folder))
        faults = dict.fromkeys(present - self.files.keys(), "is not in the manifest")
        for path, entry in self.files.items():
            file = folder / path
            if path not in present:
                faults[path] = "is missing"
            elif (size := file.stat().st_size) != entry.size:
                faults[path] = f"has {counted(size, 'byte')} instead of {entry.size}"
            elif checksum(file) != entry.checksum:
                faults[path] = "has another SHA-256"
        return faults


def read_manifest(folder: Path) -> BackupManifest:
    """The manifest of a backup. Raises ConfigError if the folder is not a complete backup."""
    try:
        values = json.loads((folder / MANIFEST).read_text())
        files = {path: _entry(**entry) for path, entry in values.pop("files").items()}
        manifest = BackupManifest(**values, files=files)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{folder} is not a backup: it has no {MANIFEST}.", "Name one of tinsmith backup.") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{folder / MANIFEST} cannot be read: {error}", "Use another backup.") from error
    if manifest.format != FORMAT:
        raise ConfigError(f"{folder} is a backup of format {manifest.format}.", "Use the tinsmith that wrote it.")
    return manifest


def _entry(checksum: dict[str, Any], mtime_ns: int) -> FileEntry:
    return FileEntry(Checksum(**checksum), mtime_ns)


def files_of(folder: Path) -> list[str]:
    """Paths of the files of a backup, relative to it, without its manifest."""
    files = (file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*")) if not file.is_dir())
    return [path for path in files if path != MANIFEST]
