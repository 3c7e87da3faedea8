"""Sources of rows: files, the Hugging Face hub, databases. A source returns the same rows in every run.

`files/` reads files, `row_mapping.py` converts rows to tasks. Relative paths are relative to the working directory.

Example: Jsonl(type="jsonl", path="gsm8k.jsonl", answer_after="####").load()[0].answer == "72"
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import field_serializer, field_validator, model_validator
from typing_extensions import override

from tinsmith.errors import ConfigError, Unreachable
from tinsmith.plurals import counted
from tinsmith.rl.data.files.paths import read_files, read_json_file, title
from tinsmith.rl.data.files.tables import load_named
from tinsmith.rl.data.row_mapping import LazySequence, RowMapping
from tinsmith.rl.data.row_operators import Operator, apply_operators
from tinsmith.rl.data.rows import ListedRows, Rows
from tinsmith.rl.types import Demonstration, Task

T = TypeVar("T")

LearnFrom = Literal["last", "all", "text"]
"""Which tokens of a demonstration to train on: the last reply, all replies, or plain text without a chat."""


class RowSource(RowMapping):
    """Base of the sources of rows."""

    operators: tuple[Operator, ...] = ()
    """Operators on the rows, applied in order before rows become tasks."""

    @property
    def label(self) -> str:
        """Prefix of task ids."""
        raise NotImplementedError

    def read(self) -> Rows:
        """All rows in order, before operators."""
        raise NotImplementedError

    def rows(self) -> Rows:
        """All rows in order, after operators. Raises ConfigError if there are none."""
        rows = self.read()
        if not len(rows):
            raise ConfigError(f"{self.label} has no rows.", "Check the name of the source.")
        return apply_operators(rows, self.operators, self.label)

    def load(self) -> Sequence[Task]:
        """A task per row. Raises ConfigError that names the first invalid row; images are read when accessed."""
        rows = self.rows()
        for index, row in enumerate(rows.narrowed(self.fields)):
            self.check_task(row, rows.place(index))
        return _with_first(len(rows), lambda at: self.task(f"{self.label}/{at}", rows.row(at), rows.place(at)))

    def demonstrations(self, learn: LearnFrom) -> Sequence[Demonstration]:
        """A demonstration per row. Raises ConfigError that names the first invalid row."""
        rows, make = self.rows(), self.text if learn == "text" else self.demonstration
        for index, row in enumerate(rows.narrowed(self.fields)):
            make("", row, rows.place(index))
        return _with_first(len(rows), lambda at: make(f"{self.label}/{at}", rows.row(at), rows.place(at)))

    def feature(self, key: str) -> np.ndarray:
        """float64 [M]: field `key` of all M rows. Raises ConfigError if a row has no number in it."""
        try:
            return np.array([float(row[key]) for row in self.rows().narrowed([key])], np.float64)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.label}: not every row has a number in {key!r}.", "Set tasks.order.by to a numeric field."
            ) from error


class Jsonl(RowSource):
    """A file with a JSON object on each line, or with a list of objects; it may be compressed."""

    type: Literal["jsonl"] = "jsonl"
    path: str
    """Path of the file."""

    @property
    @override
    def label(self) -> str:
        return title(self.path)

    @override
    def read(self) -> Rows:
        return read_json_file(self.path)


class InlineRows(RowSource):
    """Rows in the run file itself, or given from Python. run.yaml records their number and their hash, so that a run
    resumes only with the same rows."""

    type: Literal["rows"] = "rows"
    data: tuple[Any, ...]
    """The rows: a list of mappings of fields to values."""
    name: str = "rows"
    """Prefix of the ids of tasks."""

    @field_validator("data", mode="plain")
    @classmethod
    def _check_rows(cls, rows: Any) -> tuple[Any, ...]:
        # Not validated by pydantic, which would copy every row each time the settings are.
        if not isinstance(rows, list | tuple):
            raise ValueError(f"the rows are a {type(rows).__name__}; give a list of mappings")
        if wrong := [number for number, row in enumerate(rows) if not isinstance(row, Mapping)]:
            raise ValueError(f"row {wrong[0]} is a {type(rows[wrong[0]]).__name__}, not a mapping of fields to values")
        return tuple(rows)

    @field_serializer("data", when_used="json")
    def _recorded(self, data: tuple[Any, ...]) -> str:
        return self._record

    @cached_property
    def _record(self) -> str:
        digest = hashlib.sha256()
        for row in self.data:
            digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
        return f"{counted(len(self.data), 'row')}, sha256 {digest.hexdigest()[:16]}"

    @property
    @override
    def label(self) -> str:
        return self.name

    @override
    def read(self) -> Rows:
        return ListedRows(self.data, lambda index: f"{self.name}, row {index + 1}")


class Files(RowSource):
    """CSV, JSON, Parquet or Arrow files, in the order of their names. Values of CSV are text; those of JSON are as with
    type jsonl."""

    type: Literal["files"] = "files"
    path: str
    """A file, or a pattern such as data/*.parquet. Its extension is its format: csv, tsv, json, jsonl, ndjson, parquet
    or arrow; text may be compressed, as in rows.csv.gz."""

    @property
    @override
    def label(self) -> str:
        return title(self.path)

    @override
    def read(self) -> Rows:
        return read_files(self.path)


class Hub(RowSource):
    """A dataset of the Hugging Face hub, or a local folder with the layout of one."""

    type: Literal["hub"] = "hub"
    name: str
    """Dataset id, such as openai/gsm8k, or path of a folder."""
    subset: str | None = None
    """Configuration of the dataset, such as main. In a local folder without a README.md: a subfolder of this name, if
    there is one."""
    split: str = "train"
    """Split of the dataset, such as train or test."""

    @property
    @override
    def label(self) -> str:
        return self.name

    @override
    def read(self) -> Rows:
        folder = Path(self.name).expanduser()
        if self.subset and folder.is_dir() and not (folder / "README.md").is_file():
            subfolder = folder / self.subset
            return load_named(self.name, str(subfolder if subfolder.is_dir() else folder), None, self.split)
        return load_named(self.name, str(folder) if folder.is_dir() else self.name, self.subset, self.split)


class Sql(RowSource):
    """Rows of a database."""

    type: Literal["sql"] = "sql"
    url: str
    """SQLAlchemy URL, such as sqlite:///tasks.db or postgresql+psycopg://user:password@host/name."""
    table: str = ""
    """Table to read, in the order of its primary key."""
    query: str = ""
    """Query in place of `table`. Use ORDER BY, so that every run has the same rows."""

    @model_validator(mode="after")
    def _check_table_or_query(self) -> Sql:
        if bool(self.table) == bool(self.query):
            raise ValueError("set either table or query")
        return self

    @property
    @override
    def label(self) -> str:
        return self.table or "query"

    @override
    def read(self) -> Rows:
        from sqlalchemy import MetaData, Table, create_engine, make_url, select, text
        from sqlalchemy.exc import DBAPIError, SQLAlchemyError

        is_local = self.url.startswith("sqlite")
        try:
            url = make_url(self.url)
            if is_local and url.database not in (None, "", ":memory:") and not Path(str(url.database)).exists():
                raise ConfigError(f"There is no database file {url.database}.", "Check url.")
            engine = create_engine(url)
            try:
                with engine.connect() as db:
                    if self.query:
                        found_rows = db.execute(text(self.query)).mappings()
                    else:
                        table = Table(self.table, MetaData(), autoload_with=db)
                        found_rows = db.execute(select(table).order_by(*table.primary_key.columns)).mappings()
                    rows = [dict(row) for row in found_rows]
            finally:
                engine.dispose()
        except (SQLAlchemyError, ImportError) as error:
            reason = str(error).splitlines()[0]  # later lines may contain the URL with its password
            kind = Unreachable if isinstance(error, DBAPIError) and not is_local else ConfigError
            raise kind(f"Cannot read the rows of {self.label}: {reason}", "Check url and table.") from error
        return ListedRows(rows, lambda index: f"{self.label}, row {index + 1}")


def _with_first(length: int, make: Callable[[int], T]) -> LazySequence[T]:
    """A sequence after creating its first item whole, with its images."""
    items = LazySequence(length, make)
    _ = items[0]
    return items
