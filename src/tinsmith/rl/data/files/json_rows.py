"""Rows of JSON files: an object on each line, or one list of objects.

Values are those of the file: text stays text, integers of any size stay exact, and a number fills a template as it is
written. What JSON does not have, such as NaN or a key twice, is an error that names the line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from json import JSONDecodeError
from pathlib import Path
from typing import Any, NoReturn

from typing_extensions import override

from tinsmith.errors import ConfigError
from tinsmith.rl.data.files.text import read_lines
from tinsmith.rl.data.rows import ListedRows, Row, Rows

_SPACE = " \t\r\n\ufeff"
"""What surrounds a value; files that were joined have byte order marks inside."""
_ONE_EACH = "Write one JSON object on each line, or a list of objects."


class WrittenFloat(float):
    """A number with a fraction or an exponent, and as text what the file says: 1.10 stays 1.10."""

    def __new__(cls, written: str) -> WrittenFloat:
        number = super().__new__(cls, written)
        number.written = written
        return number

    written: str

    @override
    def __str__(self) -> str:
        return self.written

    @override
    def __reduce__(self) -> tuple[type[WrittenFloat], tuple[str]]:
        return WrittenFloat, (self.written,)


class _Fault(Exception):
    """Valid syntax with a value that is refused."""


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _Fault(f"has the key {twice!r} twice", "Keep one of them.")
    return row


def _no_constant(name: str) -> NoReturn:
    raise _Fault(f"has the value {name}, which is not JSON", f'Write null, or "{name}" if it is a text.')


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=WrittenFloat, parse_constant=_no_constant)


class JsonLines(Rows):
    """Rows of the lines of a file, parsed when they are accessed."""

    def __init__(self, file: Path, lines: Sequence[str], numbers: Sequence[int]) -> None:
        self._file, self._lines, self._numbers = str(file), lines, numbers

    @override
    def __len__(self) -> int:
        return len(self._lines)

    @override
    def row(self, index: int) -> Row:
        line = self._lines[index].strip(_SPACE)
        with suppress(ValueError, RecursionError, _Fault):
            value, end = _DECODER.raw_decode(line)
            if end == len(line) and isinstance(value, dict) and "\\u" not in line:
                return value
        return _only_row(line, self.place(index))

    @override
    def place(self, index: int) -> str:
        return f"{self._file}, line {self._numbers[index]}"


def _only_row(line: str, place: str) -> Row:
    """The object that a line consists of. Raises ConfigError that says what is wrong with the line."""
    value, end = _parsed(line, 0, place)
    if rest := line[end:].strip():
        if rest == ",":
            raise ConfigError(f"{place} ends with a comma.", "Remove the comma after each object.")
        raise ConfigError(f"{place} has more than one value: {_short(rest)} follows.", _ONE_EACH)
    return _as_row(value, place)


def read_json(file: Path) -> Rows:
    """The rows of a JSON file. Raises ConfigError for a file that is not text; an invalid line raises when it is read,
    an invalid list at once."""
    lines = list(read_lines(file))
    filled = [number for number, line in enumerate(lines) if line.strip(_SPACE)]
    if filled and _is_list(lines, filled[0]):
        return _listed(file, "".join(lines))
    if filled and lines[filled[0]].strip() in ("{", '{"') and (fault := _object_over_lines(file, lines)):
        raise fault
    return JsonLines(file, [lines[number] for number in filled], [number + 1 for number in filled])


def _is_list(lines: Sequence[str], first: int) -> bool:
    """Whether a list of rows begins on this line, and not a list on each line."""
    start = lines[first].lstrip(" \t\ufeff")
    if not start.startswith("["):
        return False
    following = next((line.strip() for line in lines[first + 1 :] if line.strip()), "")
    return not (start.rstrip().endswith("]") and following.startswith("["))


def _object_over_lines(file: Path, lines: Sequence[str]) -> ConfigError | None:
    """An error for a file with one object over several lines, which is a table by columns or has the rows inside."""
    try:
        value, _ = _DECODER.raw_decode("".join(lines).strip(_SPACE))
    except (ValueError, RecursionError, _Fault):
        return None
    lists = [key for key, entry in value.items() if isinstance(entry, list)]
    example = f", such as: jq -c '.{lists[0]}[]' {file} > rows.jsonl" if len(lists) == 1 else "."
    return ConfigError(f"{file} holds one JSON object over several lines.", f"{_ONE_EACH.rstrip('.')}{example}")


def _listed(file: Path, text: str) -> Rows:
    """The rows of a list of objects."""
    rows: list[Row] = []
    numbers: list[int] = []
    at, line, last = text.index("[") + 1, 1 + text.count("\n", 0, text.index("[")), text.index("[")
    while (at := _skip_space(text, at)) < len(text) and text[at] != "]":
        line, last = line + text.count("\n", last, at), at
        row, at = _parsed(text, at, f"{file}, line {line}", line_of=file)
        rows.append(_as_row(row, f"{file}, line {line}"))
        numbers.append(line)
        at = _skip_space(text, at)
        if text[at : at + 1] == ",":
            at = _skip_space(text, at + 1)
            if text[at : at + 1] == "]":
                raise ConfigError(
                    f"{file}, line {_line(text, at)} has a comma before the end of the list.", "Remove it."
                )
        elif text[at : at + 1] != "]":
            break
    if text[at : at + 1] != "]":
        problem = "the list has no end" if at >= len(text) else "a comma is missing between rows"
        raise ConfigError(f"{file}, line {_line(text, at)}: {problem}.", "The file may be cut; write it again.")
    if rest := text[at + 1 :].strip():
        raise ConfigError(f"{file}, line {_line(text, at)} has more after the list: {_short(rest)}.", _ONE_EACH)
    return ListedRows(rows, lambda index: f"{file}, line {numbers[index]}")


def _skip_space(text: str, at: int) -> int:
    while text[at : at + 1] and text[at] in " \t\r\n":
        at += 1
    return at


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _parsed(text: str, at: int, place: str, line_of: Path | None = None) -> tuple[Any, int]:
    """The value at `at`, and where it ends. `line_of`: the file, if `text` is all of it."""
    try:
        value, end = _DECODER.raw_decode(text, at)
        if "\\u" in text[at:end].lower():
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except JSONDecodeError as error:
        where = f"{line_of}, line {error.lineno}" if line_of else place
        cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")
        raise ConfigError(
            f"{where} is not valid JSON: {error.msg.removesuffix(' at')} at column {error.colno}.",
            "The file is cut; write it again."
            if cut and line_of
            else "The line is cut, or its object goes on in the next line. " * cut + _ONE_EACH,
        ) from error
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{place} has half of a character: \\u{ord(error.object[error.start]):04x} is one of a pair of surrogates.",
            "Its text was cut within an emoji or the like; write the character again.",
        ) from error
    except _Fault as fault:
        problem, hint = fault.args
        raise ConfigError(f"{place} {problem}.", hint) from fault
    except (RecursionError, ValueError) as error:
        problem = "is nested too deeply" if isinstance(error, RecursionError) else "has a number with too many digits"
        raise ConfigError(f"{place} {problem}.", "Write such a value as text.") from error
    return value, end


def _as_row(value: Any, place: str) -> Row:
    if not isinstance(value, dict):
        raise ConfigError(f"{place} is not a JSON object: {_short(json.dumps(value, default=str))}.", _ONE_EACH)
    return value


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 40 else f"{text[:40]}…"
