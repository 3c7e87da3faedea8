"""Folders that the database does not know yet: noted before they are written, so that a start can delete orphans.

A save writes its folder before its row is committed. If the process dies in between, the folder stays and no row names
it. The note tells such an orphan from a folder that another database, or a newer copy of this one, knows.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tinsmith.atomic import remove_unfinished


class UnrecordedFolders:
    """Notes about folders below `root`, as files in a folder beside it.

    A note holds the name of the database that the folder's row will be in.
    """

    def __init__(self, root: Path, database: str) -> None:
        self._root, self._notes, self._database = root, root.with_name(f"{root.name}.unrecorded"), database

    @contextmanager
    def noted(self, name: str) -> Iterator[None]:
        """Note the folder `name`, which the block writes. After an error it is deleted, with what a killed engine has
        written of it, because the next attempt has another name."""
        self._notes.mkdir(parents=True, exist_ok=True)
        self._note(name).write_text(self._database)
        try:
            yield
        except BaseException as error:
            remove_unfinished(self._root / name)
            if isinstance(error, Exception):  # what was cancelled may still be written
                shutil.rmtree(self._root / name, ignore_errors=True)
            if not (self._root / name).exists():
                self.recorded(name)
            raise

    def recorded(self, name: str) -> None:
        """Remove the note: the database has the folder, or the folder was deleted."""
        self._note(name).unlink(missing_ok=True)

    def delete_orphans(self, is_recorded: Callable[[str], bool]) -> int:
        """At start: delete noted folders that this database should have and does not. Returns their number."""
        deleted = 0
        for note in list(self._notes.iterdir()) if self._notes.is_dir() else []:
            name = note.name.replace("~", "/")
            if not is_recorded(name):
                if note.read_text() != self._database:
                    continue
                if (self._root / name).is_dir():
                    shutil.rmtree(self._root / name)
                    deleted += 1
            note.unlink()
        return deleted

    def _note(self, name: str) -> Path:
        return self._notes / name.replace("/", "~")
