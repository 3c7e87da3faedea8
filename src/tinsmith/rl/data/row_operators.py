"""Operators on the rows of a source, applied before rows become tasks: filter, map, sort and take.

Custom functions are named `module:function` or `path/to/file.py:function`; they take a row as a dict.

Example: operators: [{type: filter, by: my_rows:is_short}, {type: take, count: 1000}]
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from tinsmith.errors import ConfigError
from tinsmith.settings import Settings

Rows = Sequence[Mapping[str, Any]]


class Filter(Settings):
    """Keep the rows for which a function returns true."""

    type: Literal["filter"] = "filter"
    by: str
    """module:function or file.py:function, which takes a row and returns whether to keep it."""

    def of(self, rows: Any) -> Any:
        """The rows to keep, as a datasets.Dataset."""
        return rows.filter(function(self.by))


class Map(Settings):
    """Change fields of each row, or add fields."""

    type: Literal["map"] = "map"
    by: str
    """module:function or file.py:function, which takes a row and returns the fields to set as a dict."""

    def of(self, rows: Any) -> Any:
        """The changed rows, as a datasets.Dataset."""
        return rows.map(function(self.by))


class Sort(Settings):
    """Sort rows by fields; the sort is stable."""

    type: Literal["sort"] = "sort"
    by: tuple[str, ...] = Field(min_length=1)
    """Fields to sort by; later fields break ties."""
    descending: bool = False
    """Sort in descending order."""

    def of(self, rows: Any) -> Any:
        """The sorted rows, as a datasets.Dataset. Raises ConfigError if the rows lack a field."""
        if missing := [name for name in self.by if name not in rows.column_names]:
            raise ConfigError(
                f"sort: the rows have no field {missing[0]!r}.", f"They have: {', '.join(rows.column_names)}."
            )
        # Dataset.sort emits deprecation warnings from its own code.
        keys = list(zip(*(rows[name] for name in self.by), strict=True))
        return rows.select(sorted(range(len(keys)), key=keys.__getitem__, reverse=self.descending))


class Take(Settings):
    """Keep a range of rows."""

    type: Literal["take"] = "take"
    count: int = Field(default=0, ge=0)
    """Number of rows to keep; 0: all rows after `skip`."""
    skip: int = Field(default=0, ge=0)
    """Number of rows to skip at the start."""

    def of(self, rows: Any) -> Any:
        """The rows of the range, as a datasets.Dataset."""
        end = min(len(rows), self.skip + self.count) if self.count else len(rows)
        return rows.select(range(self.skip, end) if self.skip < end else [])


Operator = Annotated[Filter | Map | Sort | Take, Field(discriminator="type")]


def apply_operators(rows: Rows, operators: Sequence[Operator], label: str) -> Rows:
    """`rows` after all operators, in order. Raises ConfigError if no rows remain; `label` names the source."""
    if not operators:
        return rows
    from datasets import Dataset

    table: Any = rows if isinstance(rows, Dataset) else Dataset.from_list([dict(row) for row in rows])
    for operator in operators:
        table = operator.of(table)
    if not len(table):
        raise ConfigError(f"{label}: no rows remain after the operators.", "Relax the filter.")
    return table


def function(name: str) -> Callable[..., Any]:
    """The function that `name` refers to, as module:function or file.py:function. Raises ConfigError."""
    module_name, colon, attribute = name.rpartition(":")
    if not colon:
        raise ConfigError(f"'{name}' does not name a function.", "Write module:function, or path/to/file.py:function.")
    try:
        is_file = module_name.endswith(".py")
        module = _import_file(Path(module_name)) if is_file else importlib.import_module(module_name)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"'{name}' cannot be imported: {error}.", "Check the name and the working directory."
        ) from error
    value = vars(module).get(attribute)
    if not callable(value):
        raise ConfigError(f"{module_name} has no function '{attribute}'.", "Check the name.")
    return value


def _import_file(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file.expanduser())
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
