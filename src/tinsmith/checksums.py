"""Sizes and SHA-256 of files, as the manifests of stored objects and of backups list them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Checksum:
    """The size of a file and the SHA-256 of its content, in hexadecimal."""

    bytes: int
    sha256: str


def checksum(file: Path) -> Checksum:
    """The checksum of a file, which is read whole. Raises OSError."""
    with file.open("rb") as content:
        return Checksum(file.stat().st_size, hashlib.file_digest(content, "sha256").hexdigest())
