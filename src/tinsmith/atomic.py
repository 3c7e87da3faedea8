"""Atomic writes: files and folders that are complete under their name, or absent.

Content is written under a temporary name in the same folder, synced to disk, and renamed into place. When the call
returns, the result survives a power failure.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def atomic_write(target: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replace the file with `content`, synced to disk. Of concurrent writers, the last one wins.

    `mode` are the file's permissions, less those that the umask takes away.
    """
    temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex}.part")  # unique to each writer
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
        _sync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to write files into, renamed to `folder` at the end; an existing folder is replaced.

    On an error the temporary folder is removed at once, to free its disk space. What a killed writer has left is
    removed by `remove_unfinished`, or by the next writer of the same name.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        yield temporary
        for file in temporary.iterdir():
            _sync(file)
        _sync(temporary)
        if folder.exists():
            replaced = folder.with_name(f".{folder.name}.replaced")
            shutil.rmtree(replaced, ignore_errors=True)
            folder.rename(replaced)
            temporary.rename(folder)
            shutil.rmtree(replaced)
        else:
            temporary.rename(folder)
        for parent in (folder.parent, folder.parent.parent):  # the name, and that of a parent created here
            _sync(parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def shared_folder(folder: Path) -> Iterator[Path]:
    """A path to make a folder at, renamed to `folder` at the end unless another process has made that meanwhile.

    For what can be made again, such as a cache: nothing is synced.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / folder.name
        yield made
        with suppress(OSError):  # another process was first
            made.rename(folder)


def remove_unfinished(folder: Path) -> None:
    """Delete what a writer of `folder` has left that was killed."""
    shutil.rmtree(_temporary(folder), ignore_errors=True)


def link_folder(source: Path, to: Path, *names: str) -> int:
    """Copy a folder's files, or only those named, by hard links. Returns the size in bytes.

    Deleting either folder leaves the other intact. Files are copied where the file system has no hard links.
    """
    with atomic_folder(to) as temporary:
        for file in [source / name for name in names] or list(source.iterdir()):
            link_file(file, temporary / file.name)
        return folder_size(temporary)


def folder_size(folder: Path) -> int:
    """Total size in bytes of the files directly inside."""
    return sum(file.stat().st_size for file in folder.iterdir())


def link_file(source: Path, to: Path) -> None:
    """Hard-link a file, or copy it where the file system cannot. Raises FileNotFoundError if it is gone."""
    try:
        os.link(source, to)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, to)


def sync_folder(folder: Path) -> None:
    """Sync a folder's list of names to disk."""
    _sync(folder)


def _temporary(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.writing")


def _sync(path: Path) -> None:
    """Sync a file, or a folder's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)
