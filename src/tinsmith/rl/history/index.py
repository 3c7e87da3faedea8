"""The index of the rollouts of a run folder: a row of each in SQLite, so that a million can be filtered and searched.

The recorder adds the rows of each file that it writes. Whoever reads compares the index with the files, and adds what
is missing: of a recorder that was killed, of a folder without an index, or of one whose index is damaged. An index that
cannot be written is kept in a temporary file. The files are what counts; the index may be deleted at any time.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from tinsmith.errors import ConfigError
from tinsmith.rl.history.filters import RolloutFilter, Sort
from tinsmith.rl.history.rows import (
    ROLE_SEPARATOR,
    GroupNumbers,
    Page,
    RolloutRow,
    searched_text,
    values_of,
)
from tinsmith.rl.record.layout import Kind, Layout

_SCHEMA_VERSION = 1
_FIELDS = tuple(each.name for each in fields(RolloutRow))
_COLUMNS = tuple({"group": "grp", "index": "idx"}.get(name, name) for name in _FIELDS)
_TABLES = f"""
CREATE TABLE files (kind TEXT, step INTEGER, size INTEGER, mtime INTEGER, tail INTEGER, PRIMARY KEY (kind, step));
CREATE TABLE rollouts (
    kind TEXT, step INTEGER, line INTEGER, offset INTEGER, length INTEGER, grp INTEGER, idx INTEGER, version INTEGER,
    task TEXT, environment TEXT, roles TEXT, reward REAL, correct INTEGER, failed INTEGER, cut INTEGER,
    termination TEXT, turns INTEGER, tokens INTEGER, advantage REAL, preview TEXT, text_id INTEGER,
    PRIMARY KEY (kind, step, line)
) WITHOUT ROWID;
CREATE TABLE texts (id INTEGER PRIMARY KEY, text TEXT, whole INTEGER);
PRAGMA user_version = {_SCHEMA_VERSION};
"""
_TAIL_BYTES = 4096
_LARGEST_GROUP = 100_000
_SETTLED_NS = 2_000_000_000
"""Age of a folder's change after which a further change has another time, on any file system."""
_READER_SECONDS, _RECORDER_SECONDS = 5.0, 0.2
"""How long to wait for another process that writes the index."""

log = logging.getLogger(__name__)

T = TypeVar("T")
File = tuple[Kind, int]
"""A file of rollouts by its kind and step."""


class RolloutIndex:
    """The rollouts of a run folder, or of a part of one. Each call opens the index, from any thread.

    Example: RolloutIndex(Layout(Path("runs/demo"))).find(RolloutFilter(failed=True), sort="reward", limit=20).rows
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._temporary: sqlite3.Connection | None = None
        self._settled = _Settled()
        self._lock = threading.Lock()

    def find(
        self,
        selection: RolloutFilter | None = None,
        *,
        sort: Sort = "step",
        descending: bool = False,
        limit: int = 50,
        offset: int = 0,
        seconds: float | None = None,
    ) -> Page:
        """The rollouts that `selection` selects, `limit` of them from `offset` on.

        `seconds`: how long files may be added to the index, newest first; the rest is left to later calls. None: until
        all are there.
        """
        if sort not in get_args(Sort):
            raise ConfigError(f"Rollouts are not sorted by {sort!r}.", f"Sort by one of: {', '.join(get_args(Sort))}.")
        selection = selection or RolloutFilter()

        def page(index: _OpenIndex) -> Page:
            direction = "DESC" if descending else "ASC"
            order = f"step {direction}" if sort == "step" else f"{sort} IS NULL, {sort} {direction}, step"
            with index.selected(selection) as (source, values):
                (total,) = index.first_row(f"SELECT count(*) FROM {source}", values)
                rows = index.database.execute(
                    f"SELECT {', '.join(_COLUMNS)} FROM {source} ORDER BY {order}, kind DESC, line LIMIT ? OFFSET ?",
                    (*values, limit, offset),
                ).fetchall()
            return Page(tuple(map(_row, rows)), total, index.indexed_count, index.files)

        return self._call(page, selection, seconds)

    def row(self, identity: str) -> RolloutRow | None:
        """The row of a rollout by its name KIND-STEP-LINE; None if there is none."""
        if (place := parse_id(identity)) is None:
            return None
        statement = f"SELECT {', '.join(_COLUMNS)} FROM rollouts WHERE kind = ? AND step = ? AND line = ?"
        values = self._call(lambda index: index.first_row(statement, place), _of_file(place[0], place[1]))
        return _row(values) if values else None

    def read(self, row: RolloutRow) -> dict[str, Any]:
        """The whole record of a rollout; empty if its line holds none, or is gone."""
        statement = "SELECT offset, length FROM rollouts WHERE kind = ? AND step = ? AND line = ?"
        values = (row.kind, row.step, row.line)
        place = self._call(lambda index: index.first_row(statement, values), _of_file(row.kind, row.step))
        return _read(self._layout.rollouts(row.kind, row.step), *place) if place else {}

    def group(self, row: RolloutRow) -> tuple[RolloutRow, ...]:
        """The rollouts of the group of `row`, in order, itself among them."""
        return self.find(replace(_of_file(row.kind, row.step), group=row.group), limit=_LARGEST_GROUP).rows

    def values(self, column: Literal["task", "environment", "roles"], seconds: float | None = None) -> list[str]:
        """The different tasks, environments or roles of the rollouts, in the order of the alphabet."""
        assert column in ("task", "environment", "roles")
        statement = f"SELECT DISTINCT {column} FROM rollouts"
        texts = self._call(lambda index: index.database.execute(statement).fetchall(), RolloutFilter(), seconds)
        return sorted({part for (text,) in texts for part in text.split(ROLE_SEPARATOR)} - {""})

    def steps(self, kind: Kind) -> list[int]:
        """The steps that have rollouts."""
        return self._layout.steps_with_rollouts(kind)

    def add(self, kind: Kind, step: int, lines: Iterable[tuple[int, int, Mapping[str, Any]]]) -> None:
        """Add the rows of a file that was just written, from (offset, length, record) of each of its lines.

        A failure is logged: readers add what is missing.
        """
        try:
            with closing(_connect(self._layout.rollout_index, _RECORDER_SECONDS)) as database:
                _OpenIndex(database, self._layout, _Settled()).replace((kind, step), lines)
        except (sqlite3.Error, OSError) as error:
            log.info("The index of rollouts was not written: %s", error)

    def _call(self, function: Callable[[_OpenIndex], T], selection: RolloutFilter, seconds: float | None = None) -> T:
        """The result of `function` on the index, up to date with the files that `selection` needs.

        A damaged index is built again; one that cannot be written is kept in a temporary file.
        """
        with self._lock:
            if self._temporary is None:
                for _ in range(2):
                    try:
                        with closing(_connect(self._layout.rollout_index, _READER_SECONDS)) as database:
                            return function(
                                _OpenIndex(database, self._layout, self._settled).refreshed(seconds, selection)
                            )
                    except (sqlite3.OperationalError, OSError) as error:
                        log.info("The index of rollouts is kept in a temporary file: %s", error)
                        break
                    except sqlite3.DatabaseError as error:
                        log.info("The index of rollouts is built again: %s", error)
                        _delete(self._layout.rollout_index)
                        self._settled = _Settled()
                self._settled = _Settled()
                self._temporary = _with_tables(sqlite3.connect("", check_same_thread=False))
            return function(_OpenIndex(self._temporary, self._layout, self._settled).refreshed(seconds, selection))


@dataclass
class _Settled:
    """The folder of rollouts as it was when all of its files were in the index."""

    changed: int = -1
    """Time of the folder's last change, in nanoseconds, as all its files were in the index."""
    files: tuple[File, ...] = ()


@dataclass
class _OpenIndex:
    """A connection to the index, and the files that it describes."""

    database: sqlite3.Connection
    layout: Layout
    seen: _Settled
    indexed_count: int = 0
    """Files that are in the index."""
    files: int = 0
    """Files of rollouts that the call needs."""

    def first_row(self, statement: str, values: Iterable[Any] = ()) -> Any:
        return self.database.execute(statement, tuple(values)).fetchone()

    def refreshed(self, seconds: float | None, selection: RolloutFilter) -> _OpenIndex:
        """Add the files that are new or have changed and that `selection` needs, newest first, for some seconds."""
        changed = self._changed()
        if changed != self.seen.changed:
            present = self._add_missing(selection, seconds)
            is_settled = time.time_ns() - changed > _SETTLED_NS and self.indexed_count == len(present)
            self.seen.changed, self.seen.files = (changed, tuple(present)) if is_settled else (-1, ())
        else:
            self.files = self.indexed_count = sum(selection.selects_file(*file) for file in self.seen.files)
        return self

    def _changed(self) -> int:
        try:
            return self.layout.rollouts_folder.stat().st_mtime_ns
        except OSError:
            return 0

    def _add_missing(self, selection: RolloutFilter, seconds: float | None) -> list[File]:
        """Add files that are new or have changed; returns all files."""
        begin = time.monotonic()
        kinds: tuple[Kind, ...] = get_args(Kind)
        present: list[File] = [(kind, step) for kind in kinds for step in self.layout.steps_with_rollouts(kind)]
        indexed: dict[File, tuple[int, int, int]] = {
            (kind, step): (size, mtime, tail) for kind, step, size, mtime, tail in self._files()
        }
        if gone := indexed.keys() - set(present):
            with self.database:
                for file in gone:
                    self._remove(file)
        needed = [file for file in present if selection.selects_file(*file)]
        stale = [file for file in needed if not self._is_current(file, indexed.get(file))]
        waiting = sorted(stale, key=lambda file: file[1])
        while waiting and (seconds is None or time.monotonic() - begin < seconds):
            file = waiting.pop()
            with suppress(FileNotFoundError):  # deleted by a run that continues from an earlier step
                self.replace(file, _lines(self.layout.rollouts(*file)))
        self.files, self.indexed_count = len(needed), len(needed) - len(waiting)
        return present

    def replace(self, file: File, lines: Iterable[tuple[int, int, Mapping[str, Any]]]) -> None:
        """Set the rows of a file, in one transaction."""
        path = self.layout.rollouts(*file)
        status, tail = path.stat(), _tail(path)
        with self.database:
            self.database.execute("BEGIN IMMEDIATE")
            self._remove(file)
            (text_id,) = self.first_row("SELECT coalesce(max(id), 0) FROM texts")
            rows, texts = [], []
            numbers = GroupNumbers()
            for number, (offset, length, record) in enumerate(lines):
                *values, text, whole = values_of(record, numbers.of(record))
                text_id += 1
                texts.append((text_id, _encodable(text), whole))
                rows.append((*file, number, offset, length, *map(_encodable, values), text_id))
            self.database.executemany("INSERT INTO texts VALUES (?, ?, ?)", texts)
            marks = ", ".join("?" * len(rows[0])) if rows else ""
            self.database.executemany(f"INSERT INTO rollouts VALUES ({marks})", rows)
            self.database.execute(
                "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)", (*file, status.st_size, status.st_mtime_ns, tail)
            )

    @contextmanager
    def selected(self, selection: RolloutFilter) -> Iterator[tuple[str, list[Any]]]:
        """FROM and WHERE of the rollouts that are selected, with their values. A search is made once, for all
        statements of the block: it reads every text."""
        where, values = self._condition(selection)
        if not selection.search:
            yield f"rollouts WHERE {where}", values
            return
        self.database.execute(f"CREATE TEMP TABLE found AS SELECT kind, step, line FROM rollouts WHERE {where}", values)
        try:
            yield "temp.found JOIN rollouts USING (kind, step, line)", []
        finally:
            self.database.execute("DROP TABLE temp.found")

    def _condition(self, selection: RolloutFilter) -> tuple[str, list[Any]]:
        """WHERE, with its values. A search reads the rollouts that are longer than what the index holds of them."""
        conditions = ["1", *(text for text, _ in selection.conditions())]
        values = [value for _, each in selection.conditions() for value in each]
        if selection.search:
            needle = selection.search.casefold()
            self.database.create_function("searched", 4, lambda *place: self._matches(needle, *place))
            conditions.append(
                "(SELECT CASE WHEN instr(text, ?) THEN 1 WHEN whole THEN 0 "  # AND would call the function anyway
                "ELSE searched(kind, step, offset, length) END FROM texts WHERE id = text_id)"
            )
            values.append(_encodable(needle))
        return " AND ".join(conditions), values

    def _matches(self, needle: str, kind: Kind, step: int, offset: int, length: int) -> bool:
        return needle in searched_text(_read(self.layout.rollouts(kind, step), offset, length))

    def _files(self) -> Iterator[tuple[Kind, int, int, int, int]]:
        yield from self.database.execute("SELECT kind, step, size, mtime, tail FROM files")

    def _is_current(self, file: File, indexed: tuple[int, int, int] | None) -> bool:
        """Whether the rows of a file are those of its content. A copy of a folder has other times."""
        if indexed is None:
            return False
        path = self.layout.rollouts(*file)
        try:
            status = path.stat()
            if (status.st_size, status.st_mtime_ns) == indexed[:2]:
                return True
            return status.st_size == indexed[0] and _tail(path) == indexed[2]
        except FileNotFoundError:
            return True

    def _remove(self, file: File) -> None:
        self.database.execute(
            "DELETE FROM texts WHERE id IN (SELECT text_id FROM rollouts WHERE kind = ? AND step = ?)", file
        )
        self.database.execute("DELETE FROM rollouts WHERE kind = ? AND step = ?", file)
        self.database.execute("DELETE FROM files WHERE kind = ? AND step = ?", file)


def _of_file(kind: Kind, step: int) -> RolloutFilter:
    return RolloutFilter(kind=kind, steps=(step, step))


def parse_id(identity: str) -> tuple[Kind, int, int] | None:
    """(kind, step, line) of KIND-STEP-LINE; None for other text."""
    kind, *numbers = identity.split("-")
    if (
        kind not in get_args(Kind)
        or len(numbers) != 2
        or not all(each.isascii() and each.isdigit() for each in numbers)
    ):
        return None
    step, line = (int(each[:18]) for each in numbers)
    return ("train" if kind == "train" else "eval"), step, line


def _connect(file: Path, timeout: float) -> sqlite3.Connection:
    """A connection to the index, with its tables. Raises sqlite3.Error."""
    database = sqlite3.connect(file, timeout=timeout)
    try:
        database.execute("PRAGMA synchronous = OFF")  # after a power failure it is built again
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version == _SCHEMA_VERSION:
            return database
        if version == 0 and not database.execute("SELECT 1 FROM sqlite_master").fetchone():
            return _with_tables(database)
        raise sqlite3.DatabaseError(f"{file} is an index of another version")
    except BaseException:
        database.close()
        raise


def _with_tables(database: sqlite3.Connection) -> sqlite3.Connection:
    with suppress(sqlite3.OperationalError):  # another process was first
        database.executescript(f"BEGIN IMMEDIATE; {_TABLES} COMMIT;")
    return database


def _delete(file: Path) -> None:
    for path in (file, file.with_name(f"{file.name}-journal")):
        path.unlink(missing_ok=True)


def _row(values: tuple[Any, ...]) -> RolloutRow:
    named = dict(zip(_FIELDS, values, strict=True))
    named["roles"] = tuple(role for role in named["roles"].split(ROLE_SEPARATOR) if role)
    for name in ("correct", "failed", "cut"):
        named[name] = None if named[name] is None else bool(named[name])
    return RolloutRow(**named)


def _lines(file: Path) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    """(offset, length, record) of each line; a line that is no JSON object counts as an empty one."""
    offset = 0
    with file.open("rb") as lines:
        for line in lines:
            if line.strip():
                yield offset, len(line), _parse(line)
            offset += len(line)


def _read(file: Path, offset: int, length: int) -> dict[str, Any]:
    try:
        with file.open("rb") as content:
            content.seek(offset)
            return _parse(content.read(length))
    except OSError:
        return {}


def _parse(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _tail(file: Path) -> int:
    """A checksum of the end of a file."""
    with file.open("rb") as content:
        content.seek(max(0, file.stat().st_size - _TAIL_BYTES))
        return zlib.crc32(content.read(_TAIL_BYTES))


def _encodable(value: Any) -> Any:
    """The value, where text has a replacement character for what UTF-8 cannot hold and SQLite ends at."""
    return (
        value.encode(errors="replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
        if isinstance(value, str)
        else value
    )
