"""Operators on the rows of a source, applied before rows become tasks: filter, map, sort and take.

Custom functions are named `module:function` or `path/to/file.py:function`; they take a row as a dict.

Example: operators: [{type: filter, by: my_rows:is_short}, {type: take, count: 1000}]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from tinsmith.errors import ConfigError
from tinsmith.imports import import_object
from tinsmith.rl.data.rows import ListedRows, Row, Rows
from tinsmith.settings import Settings


class Filter(Settings):
    """Keep the rows for which a function returns true."""

    type: Literal["filter"] = "filter"
    by: str
    """module:function or file.py:function, which takes a row and returns whether to keep it."""

    def of(self, rows: Rows) -> Rows:
        """The rows to keep. Raises ConfigError that names the row for which the function fails."""
        keep = function(self.by)
        return rows.select([at for at, row in enumerate(rows) if _called(keep, self.by, row, rows.place(at))])


class Map(Settings):
    """Change fields of each row, or add fields."""

    type: Literal["map"] = "map"
    by: str
    """module:function or file.py:function, which takes a row and returns the fields to set as a dict."""

    def of(self, rows: Rows) -> Rows:
        """The changed rows. Raises ConfigError that names the row for which the function fails."""
        change, changed = function(self.by), list[dict[str, Any]]()
        for at, row in enumerate(rows):
            fields = _called(change, self.by, row, rows.place(at))
            if not isinstance(fields, Mapping):
                problem = f"{rows.place(at)}: {self.by} returns a {type(fields).__name__}, not a dict of fields."
                raise ConfigError(problem, "Return the fields to set.")
            changed.append({**row, **fields})
        return ListedRows(changed, rows.place)


class Sort(Settings):
    """Sort rows by fields; the sort is stable. Fields that hold numbers in every row, as numbers or as text, are sorted
    by number."""

    type: Literal["sort"] = "sort"
    by: tuple[str, ...] = Field(min_length=1)
    """Fields to sort by; later fields break ties."""
    descending: bool = False
    """Sort in descending order."""

    def of(self, rows: Rows) -> Rows:
        """The sorted rows. Raises ConfigError if the rows lack a field, or if its values have no order."""
        columns: dict[str, list[Any]] = {name: [] for name in self.by}
        for at, row in enumerate(rows.narrowed(self.by)):
            for name, values in columns.items():
                if name not in row:
                    problem = f"sort: {rows.place(at)}: the rows have no field {name!r}."
                    raise ConfigError(problem, f"They have: {', '.join(map(str, row))}.")
                values.append(row[name])
        keys = list(zip(*(_as_numbers(values) for values in columns.values()), strict=True))
        try:
            return rows.select(sorted(range(len(keys)), key=keys.__getitem__, reverse=self.descending))
        except TypeError as error:
            fields = ", ".join(self.by)
            raise ConfigError(
                f"sort: the values of {fields} have no order: {error}.", "Map them to numbers."
            ) from error


class Take(Settings):
    """Keep a range of rows."""

    type: Literal["take"] = "take"
    count: int = Field(default=0, ge=0)
    """Number of rows to keep; 0: all rows after `skip`."""
    skip: int = Field(default=0, ge=0)
    """Number of rows to skip at the start."""

    def of(self, rows: Rows) -> Rows:
        """The rows of the range."""
        end = min(len(rows), self.skip + self.count) if self.count else len(rows)
        return rows.select(range(self.skip, max(self.skip, end)))


Operator = Annotated[Filter | Map | Sort | Take, Field(discriminator="type")]


def apply_operators(rows: Rows, operators: Sequence[Operator], label: str) -> Rows:
    """`rows` after all operators, in order. Raises ConfigError if no rows remain; `label` names the source."""
    for operator in operators:
        rows = operator.of(rows)
    if operators and not len(rows):
        raise ConfigError(f"{label}: no rows remain after the operators.", "Relax the filter.")
    return rows


def _called(call: Callable[..., Any], name: str, row: Row, place: str) -> Any:
    """What the user's function returns for a row. Raises ConfigError that names the row if it fails."""
    try:
        return call(dict(row))
    except Exception as error:
        raise ConfigError(
            f"{place}: {name} fails with {type(error).__name__}: {error}.", "Correct the function, or the row."
        ) from error


def _as_numbers(values: list[Any]) -> list[Any]:
    """The values as numbers, if all are numbers or text of numbers, as in CSV; else as they are."""
    try:
        return [value if isinstance(value, int | float) else float(value) for value in values]
    except (TypeError, ValueError):
        return values


def function(name: str) -> Callable[..., Any]:
    """The function that `name` refers to, as module:function or file.py:function. Raises ConfigError."""
    if ":" not in name:
        raise ConfigError(f"'{name}' does not name a function.", "Write module:function, or path/to/file.py:function.")
    try:
        value = import_object(name)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"'{name}' cannot be imported: {error}.", "Check the name and the working directory."
        ) from error
    if not callable(value):
        raise ConfigError(f"'{name}' is not a function.", "Check the name.")
    return value
