"""Statements that write many rows of a SQLite database at once.

sqlite3 gives up Python's lock for each execution of a statement and then waits for it, because the event loop is busy
in another thread: an execution for each row would make a transaction take as long as the event loop takes for as many
steps. PostgreSQL's driver sends all rows together, so it gets SQLAlchemy's statement for one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

from sqlalchemy import Connection, Executable

MAX_ROWS = 64
"""Rows of one execution. Executions have powers of two, so that few statements are compiled and stay so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStatement:
    """A statement that is executed for rows of values."""

    columns: tuple[str, ...]
    """Names of a row's values, which are the parameters of `postgresql`."""
    sqlite: str
    """The statement, with {rows} in place of (?, ?), (?, ?)…"""
    postgresql: Executable
    """The statement for one row."""

    def execute(self, db: Connection, rows: Sequence[tuple[Any, ...]]) -> None:
        """Execute the statement for each row. Nothing is executed without rows."""
        if db.dialect.name == "sqlite":
            self._execute_on_sqlite(db, rows)
        elif rows:
            db.execute(self.postgresql, [dict(zip(self.columns, row, strict=True)) for row in rows])

    def _execute_on_sqlite(self, db: Connection, rows: Sequence[tuple[Any, ...]]) -> None:
        start = 0
        while start < len(rows):
            count = min(MAX_ROWS, 1 << ((len(rows) - start).bit_length() - 1))
            part = rows[start : start + count]
            db.exec_driver_sql(_text(self.sqlite, len(self.columns), count), tuple(chain.from_iterable(part)))
            start += count


@cache
def _text(statement: str, columns: int, rows: int) -> str:
    row = f"({', '.join('?' * columns)})"
    return statement.replace("{rows}", ", ".join([row] * rows))
