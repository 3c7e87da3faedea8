"""Where rows of data come from: files, the hub, a database. Each gives the same rows in every run.

Leaves out how a row becomes a task (`fields.py`). Relative paths are relative to where the command runs.

Example: Jsonl(type="jsonl", path="gsm8k.jsonl", answer_after="####").load()[0].answer == "72"
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import model_validator

from tinsmith.errors import ConfigError
from tinsmith.rl.data.row_mapping import LazySequence, RowMapping
from tinsmith.rl.data.row_operators import Operator, Rows, apply_operators
from tinsmith.rl.types import Demonstration, Task

LearnFrom = Literal["last", "all", "text"]
"""Of a demonstration: the last turn of its assistant, every one, or plain text without a chat."""


class RowSource(RowMapping):
    """What every source of rows has."""

    operators: tuple[Operator, ...] = ()
    """What is done to the rows first, in turn."""

    @property
    def label(self) -> str:
        """Begins the ids of its tasks."""
        raise NotImplementedError

    def read(self) -> Rows:
        """All rows in their order, before operators."""
        raise NotImplementedError

    def rows(self) -> Rows:
        """After operators."""
        return apply_operators(self.read(), self.operators, self.label)

    def load(self) -> Sequence[Task]:
        """A task for each row; an invalid row raises at once if it is the first, else when it is drawn."""
        rows = self.rows()
        tasks = LazySequence(len(rows), lambda index: self.task(f"{self.label}/{index}", rows[index]))
        return _tried(tasks)

    def demonstrations(self, learn: LearnFrom) -> Sequence[Demonstration]:
        """A demonstration for each row."""
        rows, make = self.rows(), self.text if learn == "text" else self.demonstration
        return _tried(LazySequence(len(rows), lambda index: make(f"{self.label}/{index}", rows[index])))

    def feature(self, key: str) -> np.ndarray:
        """float64 [M]: a field of every row. Raises ConfigError where it is no number."""
        try:
            return np.array([float(row[key]) for row in self.rows()], np.float64)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.label}: not every row has a number in {key!r}.", "Name another field in tasks.order.by."
            ) from error


class Jsonl(RowSource):
    """A file with a JSON object on each line."""

    type: Literal["jsonl"] = "jsonl"
    path: str
    """The file."""

    @property
    def label(self) -> str:
        """The file's name."""
        return Path(self.path).stem

    def read(self) -> Rows:
        """Blank lines are passed over."""
        file = Path(self.path).expanduser()
        if not file.is_file():
            raise ConfigError(f"There is no task file {file}.", "Check tasks' path; it is relative to where you are.")
        with file.open(encoding="utf-8") as lines:
            return list(_objects(file, (line for line in lines if line.strip())))


class Files(RowSource):
    """Parquet, CSV, JSON or Arrow files, read by the package datasets."""

    type: Literal["files"] = "files"
    path: str
    """A file, or a pattern as data/*.parquet; its ending tells what it is: parquet, csv, json, jsonl or arrow."""

    @property
    def label(self) -> str:
        """The file's name."""
        return Path(self.path).stem

    def read(self) -> Rows:
        """All files' rows, by name."""
        kinds = {"parquet": "parquet", "csv": "csv", "json": "json", "jsonl": "json", "arrow": "arrow"}
        kind = kinds.get(Path(self.path).suffix.removeprefix("."))
        if kind is None:
            raise ConfigError(f"{self.path} has none of the endings {', '.join(kinds)}.", "Set path to such a file.")
        return _dataset(self.path, kind, data_files=str(Path(self.path).expanduser()), split="train")


class Hub(RowSource):
    """A dataset of the Hugging Face hub, or a local folder in its layout."""

    type: Literal["hub"] = "hub"
    name: str
    """As openai/gsm8k, or a folder."""
    subset: str | None = None
    """As main. A local folder without a README.md has it as a folder of that name, or is all of one subset."""
    split: str = "train"
    """As train or test."""

    @property
    def label(self) -> str:
        """Its name."""
        return self.name

    def read(self) -> Rows:
        """The split's rows."""
        folder = Path(self.name).expanduser()
        if self.subset and folder.is_dir() and not (folder / "README.md").is_file():
            inside = folder / self.subset
            return _dataset(self.name, str(inside if inside.is_dir() else folder), split=self.split)
        return _dataset(self.name, self.name, self.subset, split=self.split)


class Sql(RowSource):
    """Rows of a database."""

    type: Literal["sql"] = "sql"
    url: str
    """As sqlite:///tasks.db or postgresql+psycopg://user:password@host/name."""
    table: str = ""
    """All rows of this table, in the order of its primary key."""
    query: str = ""
    """In place of a table; let it say ORDER BY, so that every run has the same rows."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Sql:
        if bool(self.table) == bool(self.query):
            raise ValueError("sql wants a table or a query")
        return self

    @property
    def label(self) -> str:
        """The table's name."""
        return self.table or "query"

    def read(self) -> Rows:
        """Read whole, once."""
        from sqlalchemy import MetaData, Table, create_engine, make_url, select, text
        from sqlalchemy.exc import SQLAlchemyError

        try:
            engine = create_engine(make_url(self.url))
            try:
                with engine.connect() as db:
                    if self.query:
                        return [dict(row) for row in db.execute(text(self.query)).mappings()]
                    stored = Table(self.table, MetaData(), autoload_with=db)
                    found = db.execute(select(stored).order_by(*stored.primary_key.columns)).mappings()
                    return [dict(row) for row in found]
            finally:
                engine.dispose()
        except (SQLAlchemyError, ImportError) as error:
            what = str(error).splitlines()[0]  # the URL may hold a password; the error's first line does not
            raise ConfigError(f"The rows of {self.label} cannot be read: {what}", "Check url and table.") from error


def _tried(things: LazySequence[Any]) -> LazySequence[Any]:
    if not len(things):
        return things
    _ = things[0]
    return things


def _dataset(place: str, *words: Any, **options: Any) -> Rows:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ConfigError(f"{place} needs the package datasets.", "pip install 'tinsmith[hub]'.") from error
    try:
        return load_dataset(*words, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(f"The dataset {place} cannot be loaded: {error}") from error


def _objects(file: Path, lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{file}, object {number}: {error}.", "Write one JSON object on each line.") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{file}, object {number} is no JSON object.", "Write one JSON object on each line.")
        yield row
