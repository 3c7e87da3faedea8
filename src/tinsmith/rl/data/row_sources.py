"""Sources of rows: files, the Hugging Face hub, databases. A source returns the same rows in every run.

`row_mapping.py` converts rows to tasks. Relative paths are relative to the working directory.

Example: Jsonl(type="jsonl", path="gsm8k.jsonl", answer_after="####").load()[0].answer == "72"
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import field_serializer, field_validator, model_validator
from typing_extensions import override

from tinsmith.errors import ConfigError
from tinsmith.plurals import counted
from tinsmith.rl.data.row_mapping import LazySequence, RowMapping
from tinsmith.rl.data.row_operators import Operator, Rows, apply_operators
from tinsmith.rl.types import Demonstration, Task

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
        """All rows in order, after operators."""
        return apply_operators(self.read(), self.operators, self.label)

    def load(self) -> Sequence[Task]:
        """A task per row. An invalid first row raises ConfigError here, a later one when it is accessed."""
        rows = self.rows()
        tasks = LazySequence(len(rows), lambda index: self.task(f"{self.label}/{index}", rows[index]))
        return _check_first(tasks)

    def demonstrations(self, learn: LearnFrom) -> Sequence[Demonstration]:
        """A demonstration per row. An invalid first row raises ConfigError here, a later one when it is accessed."""
        rows, make = self.rows(), self.text if learn == "text" else self.demonstration
        return _check_first(LazySequence(len(rows), lambda index: make(f"{self.label}/{index}", rows[index])))

    def feature(self, key: str) -> np.ndarray:
        """float64 [M]: field `key` of all M rows. Raises ConfigError if a row has no number in it."""
        try:
            return np.array([float(row[key]) for row in self.rows()], np.float64)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.label}: not every row has a number in {key!r}.", "Set tasks.order.by to a numeric field."
            ) from error


class Jsonl(RowSource):
    """A file with a JSON object on each line."""

    type: Literal["jsonl"] = "jsonl"
    path: str
    """Path of the file."""

    @property
    @override
    def label(self) -> str:
        return Path(self.path).stem

    @override
    def read(self) -> Rows:
        file = Path(self.path).expanduser()
        if not file.is_file():
            raise ConfigError(f"There is no data file {file}.", "Check path; it is relative to the working directory.")
        with file.open(encoding="utf-8") as lines:
            return list(_objects(file, (line for line in lines if line.strip())))


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
        return list(self.data)


class Files(RowSource):
    """Parquet, CSV, JSON or Arrow files, read with the datasets package in the order of their names."""

    type: Literal["files"] = "files"
    path: str
    """A file, or a pattern such as data/*.parquet. Its extension is its format: parquet, csv, json, jsonl or arrow."""

    @property
    @override
    def label(self) -> str:
        return Path(self.path).stem

    @override
    def read(self) -> Rows:
        formats = {"parquet": "parquet", "csv": "csv", "json": "json", "jsonl": "json", "arrow": "arrow"}
        format_name = formats.get(Path(self.path).suffix.removeprefix("."))
        if format_name is None:
            raise ConfigError(
                f"{self.path} does not have the extension of a supported format.",
                f"Set path to a file with one of the extensions {', '.join(formats)}.",
            )
        return _load_dataset(self.path, format_name, data_files=str(Path(self.path).expanduser()), split="train")


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
            return _load_dataset(self.name, str(subfolder if subfolder.is_dir() else folder), split=self.split)
        return _load_dataset(self.name, self.name, self.subset, split=self.split)


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
        from sqlalchemy.exc import SQLAlchemyError

        try:
            engine = create_engine(make_url(self.url))
            try:
                with engine.connect() as db:
                    if self.query:
                        return [dict(row) for row in db.execute(text(self.query)).mappings()]
                    table = Table(self.table, MetaData(), autoload_with=db)
                    rows = db.execute(select(table).order_by(*table.primary_key.columns)).mappings()
                    return [dict(row) for row in rows]
            finally:
                engine.dispose()
        except (SQLAlchemyError, ImportError) as error:
            reason = str(error).splitlines()[0]  # later lines may contain the URL with its password
            raise ConfigError(f"Cannot read the rows of {self.label}: {reason}", "Check url and table.") from error


def _check_first(items: LazySequence[Any]) -> LazySequence[Any]:
    """Return `items` after creating the first item, so that a wrong mapping raises before the run starts."""
    if not len(items):
        return items
    _ = items[0]
    return items


def _load_dataset(label: str, *arguments: Any, **options: Any) -> Rows:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ConfigError(f"{label} needs the datasets package.", "Run pip install 'tinsmith[hub]'.") from error
    try:
        return load_dataset(*arguments, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot load the dataset {label}: {error}") from error


def _objects(file: Path, lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(
                f"{file}, object {number} is not valid JSON: {error}.", "Write one JSON object on each line."
            ) from error
        if not isinstance(row, dict):
            raise ConfigError(f"{file}, object {number} is not a JSON object.", "Write one JSON object on each line.")
        yield row
