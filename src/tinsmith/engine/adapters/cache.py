"""Objects in a folder of this machine, for the processes that do not see the data folder.

    CACHE/DIGEST/           an object: files that never change, whole or absent
    CACHE/.process-…/       what one process writes or fetches, until it is whole; deleted when the process has ended
    CACHE/.locks/XX         held while an object comes or goes

Processes of a machine share a cache. The least recently used objects are deleted when it is full, but none that was
used lately: a process looks at an object's folder again before each use, and fetches it again if it is gone. No torch
here.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import pickle
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tinsmith.atomic import folder_size
from tinsmith.errors import ConfigError

if TYPE_CHECKING:
    from tinsmith.engine.adapters.store import Manifest, ObjectStore

UNUSED_S = 600.0
"""Least time that a folder stays after its last use: an engine may be reading it."""
DEFAULT_CACHE = Path("~/.cache/tinsmith/objects")
_SWEEP = "sw"
"""The lock of processes that come, or delete what others have left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSettings:
    """The object store of a service, for its processes."""

    url: str
    cache_bytes: int
    """Size of the cache of a machine."""
    cache: Path = DEFAULT_CACHE

    def encode(self) -> bytes:
        """The settings as the payload of a launch token."""
        return pickle.dumps(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenObject:
    """An object in the cache of the machine where it was written, and not in the store yet."""

    bytes: int
    digest: str
    names: tuple[str, ...]
    """Of its files."""


class ObjectCache:
    """Objects of a store in a folder of this machine, for one process. All calls block."""

    def __init__(self, store: ObjectStore, root: Path, limit: int) -> None:
        """`limit`: bytes of all objects; those that were used lately may take more."""
        self._store, self._root, self._limit = store, root, limit
        self._numbers = itertools.count()
        (root / ".locks").mkdir(mode=0o700, parents=True, exist_ok=True)
        root.chmod(0o700)
        with self._locked(_SWEEP):
            self._own = Path(tempfile.mkdtemp(prefix=".process-", dir=root))
            self._alive = (self._own / "alive").open("w")
            fcntl.flock(self._alive, fcntl.LOCK_EX)  # until this process ends, however it ends

    @classmethod
    def of(cls, settings: ObjectSettings) -> ObjectCache:
        """The cache of this machine. Raises ConfigError if it cannot be written, or the store's URL not be opened."""
        from tinsmith.engine.adapters.store import ObjectStore  # with fsspec

        root = settings.cache.expanduser()
        try:
            return cls(ObjectStore(settings.url), root, settings.cache_bytes)
        except OSError as error:
            raise ConfigError(
                f"The folder {root} for adapters from the object store cannot be written on {socket.gethostname()}: "
                f"{error.strerror}.",
                "Set cluster.cache to a folder of each machine's own disk.",
            ) from error

    def new_folder(self) -> Path:
        """A path for files that are to become an object."""
        return self._own / str(next(self._numbers))

    def folder(self, digest: str) -> Path:
        """Where an object is, if it is here."""
        return self._root / digest

    def add(self, written: Path) -> Manifest:
        """Make an object of a folder that this process has written. The folder's path leads to the object's files."""
        from tinsmith.engine.adapters.store import Manifest

        manifest = Manifest.of(written)
        self._take(written, manifest.digest)
        written.symlink_to(Path("..") / manifest.digest)  # the engine reads it again by this path
        return manifest

    def ensure(self, digest: str) -> Path:
        """The folder of an object, fetched if it is not here. Raises MissingObjectError, StoreUnavailableError."""
        folder = self.folder(digest)
        if self._is_fresh(folder):
            return folder
        with self._locked(digest):
            if not folder.is_dir():
                fetched = self.new_folder()
                self._store.fetch(digest, fetched)
                fetched.rename(folder)
            os.utime(folder)
        self.trim()
        return folder

    def upload(self, digest: str, manifest: Manifest) -> None:
        """Store an object that is here. Raises StoreUnavailableError; OSError if it is not here any more."""
        folder = self.folder(digest)
        os.utime(folder)  # not to be deleted meanwhile
        self._store.publish(folder, manifest)

    def trim(self) -> int:
        """Delete the least recently used objects down to the limit, and what ended processes left. Returns how many."""
        with self._locked(_SWEEP):
            for left in self._root.glob(".process-*"):
                if _has_ended(left):
                    shutil.rmtree(left, ignore_errors=True)
        objects = (entry for entry in self._root.iterdir() if not entry.name.startswith("."))
        return trim_folders(objects, self._limit, time.time(), self._delete)

    def close(self) -> None:
        """Delete what this process was writing."""
        self._alive.close()
        shutil.rmtree(self._own, ignore_errors=True)

    def _take(self, written: Path, digest: str) -> None:
        folder = self.folder(digest)
        with self._locked(digest):
            if folder.is_dir():
                shutil.rmtree(written)
            else:
                written.rename(folder)
            os.utime(folder)
        self.trim()

    def _is_fresh(self, folder: Path) -> bool:
        """Whether a folder is here and safe from `trim` for long enough."""
        try:
            return time.time() - folder.stat().st_mtime < UNUSED_S / 2
        except FileNotFoundError:
            return False

    def _delete(self, folder: Path) -> bool:
        with self._locked(folder.name):
            with suppress(FileNotFoundError):
                if time.time() - folder.stat().st_mtime < UNUSED_S:
                    return False  # another process has just used it
                gone = folder.rename(self.new_folder())
                shutil.rmtree(gone, ignore_errors=True)
            return True

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """One process or thread at a time adds, touches or deletes the object of this digest."""
        with (self._root / ".locks" / name[:2]).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def trim_folders(folders: Iterable[Path], limit: int, now: float, delete: Callable[[Path], bool]) -> int:
    """Delete the least recently used folders, down to `limit` bytes, but none within UNUSED_S of its last use.

    The last use is a folder's time of modification. `delete` says whether it deleted. Returns how many were deleted.
    """
    used: dict[Path, tuple[float, int]] = {}
    for folder in folders:
        with suppress(FileNotFoundError):
            used[folder] = folder.stat().st_mtime, folder_size(folder)
    total, deleted = sum(size for _, size in used.values()), 0
    for folder, (last, size) in sorted(used.items(), key=lambda each: each[1]):
        if total <= limit or now - last < UNUSED_S:
            break
        if delete(folder):
            total, deleted = total - size, deleted + 1
    return deleted


def _has_ended(folder: Path) -> bool:
    """Whether the process of a folder has ended: it holds a lock for as long as it lives."""
    try:
        with (folder / "alive").open("r+") as alive:
            fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:  # locked, or just being made
        return False
