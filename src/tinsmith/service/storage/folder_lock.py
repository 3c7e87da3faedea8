"""The lock on a data folder: one server, or one restore, uses it at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinsmith.errors import ConfigError

LOCK = "lock"
"""Name of the file, which stays when the lock is free."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keep other servers off a data folder. Raises ConfigError if one uses it."""
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"Another server uses {folder}.", "End it, or give this one its own --data.") from error
        yield


def is_locked(folder: Path) -> bool:
    """Whether a server uses the folder."""
    if not (folder / LOCK).exists():
        return False
    with (folder / LOCK).open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
