"""Folders that are there whole or not at all: written beside their place, and renamed into it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """An empty folder to write into, which then takes the name, in place of an older one if there is one.

    Of what fails nothing stays: a disk that is full needs the room.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        scratch.mkdir()
        yield scratch
        if folder.exists():
            aside = folder.with_name(f".{folder.name}.replaced")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            scratch.rename(folder)
            shutil.rmtree(aside)
        else:
            scratch.rename(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def size_of(folder: Path) -> int:
    """Bytes of its files."""
    return sum(file.stat().st_size for file in folder.iterdir())
