"""Folders that are there whole or not at all: written beside their place, and renamed into it.

What has its name is on the disk, so it is there after a power cut too.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """An empty folder to write files into, which then takes the name, in place of an older one if there is one.

    Of what fails nothing stays: a disk that is full needs the room.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        scratch.mkdir()
        yield scratch
        for file in scratch.iterdir():
            _sync(file)
        _sync(scratch)
        if folder.exists():
            aside = folder.with_name(f".{folder.name}.replaced")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            scratch.rename(folder)
            shutil.rmtree(aside)
        else:
            scratch.rename(folder)
        for above in (folder.parent, folder.parent.parent):  # the name, and that of a parent made just now
            _sync(above)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def linked(source: Path, to: Path, *names: str) -> int:
    """A folder's files, or those with these names, once more under another name: hard links where the file system has
    them, so that deleting the one takes nothing from the other. Returns bytes."""
    with written_whole(to) as scratch:
        for file in [source / name for name in names] or list(source.iterdir()):
            _link(file, scratch / file.name)
        return size_of(scratch)


def size_of(folder: Path) -> int:
    """Bytes of its files."""
    return sum(file.stat().st_size for file in folder.iterdir())


def _link(source: Path, to: Path) -> None:
    try:
        os.link(source, to)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        shutil.copy2(source, to)


def _sync(place: Path) -> None:
    """Returns once a file, or a folder's list of names, is on the disk."""
    opened = os.open(place, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno != errno.EINVAL or not place.is_dir():  # network file systems know no order for folders
            raise
    finally:
        os.close(opened)


def write_whole(target: Path, content: bytes) -> None:
    """On disk when this returns, or as it was before. Of several who write at once the last one's stays."""
    draft = target.with_name(f"{target.name}.{uuid.uuid4().hex}.part")  # each writer's own; no reader looks for it
    try:
        with draft.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
