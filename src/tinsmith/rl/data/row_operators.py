"""What is done to the rows of a source before they are tasks: datasets' own filter, map and select.

A function of one's own is named `module:function`, or `path/to/file.py:function`; it takes one row, a dict.

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
    """Keep the rows that a function says yes to."""

    type: Literal["filter"] = "filter"
    by: str
    """module:function, or file.py:function: a row in, whether to keep it out."""

    def of(self, rows: Any) -> Any:
        """Through datasets' filter."""
        return rows.filter(function(self.by))


class Map(Settings):
    """Change each row, or add fields to it."""

    type: Literal["map"] = "map"
    by: str
    """module:function, or file.py:function: a row in, the fields to set out."""

    def of(self, rows: Any) -> Any:
        """Through datasets' map."""
        return rows.map(function(self.by))


class Sort(Settings):
    """Put rows in the order of fields."""

    type: Literal["sort"] = "sort"
    by: tuple[str, ...] = Field(min_length=1)
    """Fields; later ones decide where earlier ones are equal."""
    descending: bool = False
    """Largest first."""

    def of(self, rows: Any) -> Any:
        """Rows that are equal in all fields keep their order. datasets' own sort warns of what it uses itself."""
        if missing := [name for name in self.by if name not in rows.column_names]:
            raise ConfigError(
                f"sort: the rows have no field {missing[0]!r}.", f"They have: {', '.join(rows.column_names)}."
            )
        keys = list(zip(*(rows[name] for name in self.by), strict=True))
        return rows.select(sorted(range(len(keys)), key=keys.__getitem__, reverse=self.descending))


class Take(Settings):
    """Keep some rows by their place."""

    type: Literal["take"] = "take"
    count: int = Field(default=0, ge=0)
    """How many; 0 is all that are left."""
    skip: int = Field(default=0, ge=0)
    """Leave out so many first."""

    def of(self, rows: Any) -> Any:
        """Through datasets' select."""
        end = min(len(rows), self.skip + self.count) if self.count else len(rows)
        return rows.select(range(self.skip, end) if self.skip < end else [])


Operator = Annotated[Filter | Map | Sort | Take, Field(discriminator="type")]


def apply_operators(rows: Rows, operators: Sequence[Operator], place: str) -> Rows:
    """`rows` after each operator in turn. Raises ConfigError where none are left."""
    if not operators:
        return rows
    from datasets import Dataset

    table: Any = rows if isinstance(rows, Dataset) else Dataset.from_list([dict(row) for row in rows])
    for operator in operators:
        table = operator.of(table)
    if not len(table):
        raise ConfigError(f"{place}: its operators leave no rows.", "Loosen the filter.")
    return table


def function(name: str) -> Callable[..., Any]:
    """What `module:function` or `file.py:function` names."""
    where, colon, what = name.rpartition(":")
    if not colon:
        raise ConfigError(f"'{name}' names no function.", "Write module:function, or path/to/file.py:function.")
    try:
        module = _file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except (ImportError, OSError) as error:
        raise ConfigError(f"'{name}' cannot be imported: {error}.", "Check the name and where you are.") from error
    found = vars(module).get(what)
    if not callable(found):
        raise ConfigError(f"{where} has no function '{what}'.", "Check the name.")
    return found


def _file(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file.expanduser())
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
