"""Rows of data: sequences of mappings that know where each row is stored.

Example: ListedRows([{"question": "2+2?"}], lambda index: f"row {index + 1}").place(0) == "row 1"
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, overload

from typing_extensions import override

Row = Mapping[str, Any]


class Rows(Sequence[Row]):
    """Base of rows. A subclass may read a row when it is accessed, and then raises ConfigError for an invalid one."""

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    @override
    def __getitem__(self, index: int | slice) -> Row | Rows:
        if isinstance(index, slice):
            return self.select(range(*index.indices(len(self))))
        return self.row(range(len(self))[index])

    @override
    def __iter__(self) -> Iterator[Row]:
        return (self.row(index) for index in range(len(self)))

    def row(self, index: int) -> Row:
        """Row `index`, 0 <= index < len(self)."""
        raise NotImplementedError

    def place(self, index: int) -> str:
        """Where row `index` is stored, for messages: a file with its line, or the name of the source with a number."""
        raise NotImplementedError

    def select(self, indices: Sequence[int]) -> Rows:
        """The rows at `indices`, in that order."""
        return SelectedRows(self, indices)

    def narrowed(self, fields: Collection[str]) -> Rows:
        """The same rows for a quick look at `fields`: the values of other fields may be None."""
        return self


class ListedRows(Rows):
    """Rows in a list."""

    def __init__(self, rows: Sequence[Row], place: Callable[[int], str]) -> None:
        self._rows, self._place = rows, place

    @override
    def __len__(self) -> int:
        return len(self._rows)

    @override
    def row(self, index: int) -> Row:
        return self._rows[index]

    @override
    def place(self, index: int) -> str:
        return self._place(index)


class SelectedRows(Rows):
    """Some of the rows of another sequence."""

    def __init__(self, rows: Rows, indices: Sequence[int]) -> None:
        self._rows, self._indices = rows, indices

    @override
    def __len__(self) -> int:
        return len(self._indices)

    @override
    def row(self, index: int) -> Row:
        return self._rows.row(self._indices[index])

    @override
    def place(self, index: int) -> str:
        return self._rows.place(self._indices[index])

    @override
    def narrowed(self, fields: Collection[str]) -> Rows:
        return SelectedRows(self._rows.narrowed(fields), self._indices)


class JoinedRows(Rows):
    """The rows of several sequences, one after the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._begins = [0, *accumulate(map(len, parts))]

    @override
    def __len__(self) -> int:
        return self._begins[-1]

    @override
    def __iter__(self) -> Iterator[Row]:
        return (row for part in self._parts for row in part)

    @override
    def row(self, index: int) -> Row:
        part = bisect_right(self._begins, index) - 1
        return self._parts[part].row(index - self._begins[part])

    @override
    def place(self, index: int) -> str:
        part = bisect_right(self._begins, index) - 1
        return self._parts[part].place(index - self._begins[part])

    @override
    def narrowed(self, fields: Collection[str]) -> Rows:
        return JoinedRows([part.narrowed(fields) for part in self._parts])
