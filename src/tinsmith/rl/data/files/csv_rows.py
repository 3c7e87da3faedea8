"""Rows of CSV files. Every value is the text between the separators: 007, NA, 1e5 and 2021-03-04 stay as they are.

The first line names the fields. The separator is a comma; of a file whose first line has none, the first of semicolon,
tab and bar that it has.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from typing_extensions import override

from tinsmith.errors import ConfigError
from tinsmith.plurals import counted
from tinsmith.rl.data.files.text import read_lines
from tinsmith.rl.data.rows import Row, Rows

_SEPARATORS = ",;\t|"


class CsvRows(Rows):
    """Records with the names of their fields."""

    def __init__(
        self, file: Path, fields: Sequence[str], records: Sequence[Sequence[str]], numbers: Sequence[int]
    ) -> None:
        self._file, self._fields, self._records, self._numbers = str(file), fields, records, numbers

    @override
    def __len__(self) -> int:
        return len(self._records)

    @override
    def row(self, index: int) -> Row:
        return dict(zip(self._fields, self._records[index], strict=True))

    @override
    def place(self, index: int) -> str:
        return f"{self._file}, line {self._numbers[index]}"


def read_csv(file: Path) -> Rows:
    """The rows of a CSV file. Raises ConfigError that names the line."""
    csv.field_size_limit(sys.maxsize)  # of the csv module, for all its readers; the default refuses long texts
    records: list[tuple[str, ...]] = []
    numbers: list[int] = []
    fields: Sequence[str] = ()
    for number, record in _records(file):
        if not fields:
            fields = record
            _check_fields(file, number, fields)
        elif len(record) != len(fields):
            raise ConfigError(
                f"{file}, line {number} has {counted(len(record), 'value')}, and the first line names "
                f"{counted(len(fields), 'field')}.",
                "Put a value with a separator or a line break in it between double quotes, right after the separator.",
            )
        else:
            records.append(tuple(record))
            numbers.append(number)
    return CsvRows(file, fields, records, numbers)


def _records(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Records that are not empty, each with the line that it begins on."""
    lines = read_lines(file)
    skipped, first = 0, ""
    for first in lines:
        if first.strip():
            break
        skipped += 1
    separator = _separator(first)
    if first.strip().lower() == f"sep={separator}":  # written by Excel
        skipped, first = skipped + 1, ""
    reader = csv.reader(chain([first] if first else (), lines), delimiter=separator, strict=True)
    begin = 1
    while True:
        try:
            record = next(reader, None)
        except csv.Error as error:
            raise _fault(file, skipped + begin, skipped + reader.line_num, str(error)) from error
        if record is None:
            return
        if record:
            yield skipped + begin, record
        begin = reader.line_num + 1


def _separator(first: str) -> str:
    """The separator of a file with this first line."""
    unquoted = "".join(first.split('"')[::2])
    return next((separator for separator in _SEPARATORS if separator in unquoted), ",")


def _check_fields(file: Path, number: int, fields: Sequence[str]) -> None:
    name, count = Counter(fields).most_common(1)[0]
    if count > 1:
        named = f"the field {name!r} {count} times" if name else f"{count} fields without a name"
        raise ConfigError(f"{file}, line {number} has {named}.", "Give each column a name of its own.")


def _fault(file: Path, begin: int, line: int, problem: str) -> ConfigError:
    if "unexpected end" in problem:
        return ConfigError(
            f"{file}, line {begin}: a double quote opens a value that does not end.",
            "Close it, and write a double quote inside a value twice.",
        )
    if "expected after" in problem:
        return ConfigError(
            f"{file}, line {line} has text after the double quote that ends a value.",
            'Write a double quote inside a value twice: "say ""hi""".',
        )
    return ConfigError(f"{file}, line {line} is not valid CSV: {problem}.", "Save the file again as CSV in UTF-8.")
