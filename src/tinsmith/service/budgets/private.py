"""Permissions of the data folder: only the server's user can read what it holds."""

from __future__ import annotations

import os
import stat
from pathlib import Path

PRIVATE_UMASK = 0o077
"""New files are 0600 and new folders 0700."""
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_ENTRIES = (
    "lock",
    "tinsmith.db*",
    "api-key",
    "signing-key",
    "samples*",
    "serve.log",
    "checkpoints*",
    "journal*",
    "payloads",
    "traces",
)
"""What the server keeps in a data folder; the folder may be one that holds other files too."""


def make_private(data: Path) -> int:
    """Take the permissions of other users from everything that the server keeps in a data folder.

    Links and files of another owner stay as they are. Returns the number of changed files and folders.
    """
    changed = 0
    for pattern in _ENTRIES:
        for entry in data.glob(pattern):
            changed += _restrict(entry)
            for folder, names, files in os.walk(entry) if entry.is_dir() and not entry.is_symlink() else ():
                changed += sum(_restrict(Path(folder, name)) for name in (*names, *files))
    return changed


def _restrict(path: Path) -> bool:
    try:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode) or not status.st_mode & _OTHERS or status.st_uid != os.geteuid():
            return False
        path.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS)
    except FileNotFoundError:
        return False
    return True
