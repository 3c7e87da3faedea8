<<<<<<< HEAD
"""Operators on the rows of a source, applied before rows become tasks: filter, map, sort and take.

Custom functions are named `module:function` or `path/to/file.py:function`; they take a row as a dict.
=======
"""Operators on the rows of a source: filter, map, sort and take, applied before rows become tasks.

A user function is named by `module:function` or `path/to/file.py:function`; its argument is a row, a dict.
>>>>>>> 1972812 (rl/rewards, rl/workflows, rl/monitors, rl/data: plain prose and names; trackers share a base class; worker: results of passes in operations)

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
<<<<<<< HEAD
    """module:function or file.py:function, which takes a row and returns whether to keep it."""

    def of(self, rows: Any) -> Any:
        """The rows to keep, as a datasets.Dataset."""
=======
    """Predicate, as module:function or path/to/file.py:function. Its argument is a row."""

    def apply(self, rows: Any) -> Any:
        """Return the rows after this operator."""
>>>>>>> 1972812 (rl/rewards, rl/workflows, rl/monitors, rl/data: plain prose and names; trackers share a base class; worker: results of passes in operations)
        return rows.filter(function(self.by))


class Map(Settings):
<<<<<<< HEAD
    """Change fields of each row, or add fields."""

    type: Literal["map"] = "map"
    by: str
    """module:function or file.py:function, which takes a row and returns the fields to set as a dict."""

    def of(self, rows: Any) -> Any:
        """The changed rows, as a datasets.Dataset."""
=======
    """Set fields of each row."""

    type: Literal["map"] = "map"
    by: str
    """Function, as module:function or path/to/file.py:function. Its argument is a row; it returns the fields to set."""

    def apply(self, rows: Any) -> Any:
        """Return the rows after this operator."""
>>>>>>> 1972812 (rl/rewards, rl/workflows, rl/monitors, rl/data: plain prose and names; trackers share a base class; worker: results of passes in operations)
        return rows.map(function(self.by))


class Sort(Settings):
<<<<<<< HEAD
    """Sort rows by fields; the sort is stable."""

    type: Literal["sort"] = "sort"
    by: tuple[str, ...] = Field(min_length=1)
    """Fields to sort by; later fields break ties."""
=======
    """Sort rows by fields."""

    type: Literal["sort"] = "sort"
    by: tuple[str, ...] = Field(min_length=1)
    """Fields to sort by; the first has precedence."""
>>>>>>> 1972812 (rl/rewards, rl/workflows, rl/monitors, rl/data: plain prose and names; trackers share a base class; worker: results of passes in operations)
    descending: bool = False
    """Sort in descending order."""

<<<<<<< HEAD
    def of(self, rows: Any) -> Any:
        """The sorted rows, as a datasets.Dataset. Raises ConfigError if the rows lack a field."""
=======
    def apply(self, rows: Any) -> Any:
        """Return the rows after this operator. The sort is stable; datasets' own sort emits warnings."""
>>>>>>> 1972812 (rl/rewards, rl/workflows, rl/monitors, rl/data: plain prose and names; trackers share a base class; worker: results of passes in operations)
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
<<<<<<< HEAD
    """Number of rows to keep; 0: all rows after `skip`."""
    skip: int = Field(default=0, ge=0)
    """Number of rows to skip at the start."""

    def of(self, rows: Any) -> Any:
        """The rows of the range, as a datasets.Dataset."""
=======
    """Number of rows to keep; 0: all after `skip`."""
    skip: int = Field(default=0, ge=0)
    """Number of rows to leave out at the beginning."""

    def apply(self, rows: Any) -> Any:
        """Return the rows after this operator."""
>>>>>>> 1972812 (rl/rewards, rl/workflows, rl/monitors, rl/data: plain prose and names; trackers share a base class; worker: results of passes in operations)
        end = min(len(rows), self.skip + self.count) if self.count else len(rows)
        return rows.select(range(self.skip, end) if self.skip < end else [])


Operator = Annotated[Filter | Map | Sort | Take, Field(discriminator="type")]


<<<<<<< HEAD
def apply_operators(rows: Rows, operators: Sequence[Operator], label: str) -> Rows:
    """`rows` after all operators, in order. Raises ConfigError if no rows remain; `label` names the source."""
=======
def apply_operators(rows: Rows, operators: Sequence[Operator], place: str) -> Rows:
    """Apply operators in order. Raises ConfigError if no rows are left."""
>>>>>>> 1972812 (rl/rewards, rl/workflows, rl/monitors, rl/data: plain prose and names; trackers share a base class; worker: results of passes in operations)
    if not operators:
        return rows
    from datasets import Dataset

    table: Any = rows if isinstance(rows, Dataset) else Dataset.from_list([dict(row) for row in rows])
    for operator in operators:
        table = operator.apply(table)
    if not len(table):
        raise ConfigError(f"{label}: no rows remain after the operators.", "Relax the filter.")
    return table


def function(name: str) -> Callable[..., Any]:
<<<<<<< HEAD
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
=======
    """Import the function at `module:function` or `path/to/file.py:function`. Raises ConfigError."""
    module_path, colon, attribute = name.rpartition(":")
    if not colon:
        raise ConfigError(
            f"'{name}' is not the path of a function.", "Write module:function, or path/to/file.py:function."
        )
    try:
        module = _file(Path(module_path)) if module_path.endswith(".py") else importlib.import_module(module_path)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"'{name}' cannot be imported: {error}.", "Check the name, and the folder in which the command runs."
        ) from error
    target = vars(module).get(attribute)
    if not callable(target):
        raise ConfigError(f"{module_path} has no function '{attribute}'.", "Check the name.")
    return target
>>>>>>> 1972812 (rl/rewards, rl/workflows, rl/monitors, rl/data: plain prose and names; trackers share a base class; worker: results of passes in operations)


def _import_file(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file.expanduser())
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
