"""Data files: which files a path or pattern names, and the rows of all of them.

The extension of a file is its format, after that of its compression: rows.csv, rows.jsonl.gz.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from pathlib import Path

from tinsmith.errors import ConfigError
from tinsmith.rl.data.files.csv_rows import read_csv
from tinsmith.rl.data.files.json_rows import read_json
from tinsmith.rl.data.files.tables import load_tables
from tinsmith.rl.data.files.text import unzipped_name
from tinsmith.rl.data.rows import JoinedRows, Rows
from tinsmith.settings import did_you_mean

_TEXT: dict[str, Callable[[Path], Rows]] = {
    ".csv": read_csv,
    ".tsv": read_csv,
    ".json": read_json,
    ".jsonl": read_json,
    ".ndjson": read_json,
}
_TABLES = {".parquet": "parquet", ".arrow": "arrow"}
_ADVICE = {
    ".xlsx": "Save the sheet as CSV in UTF-8.",
    ".xls": "Save the sheet as CSV in UTF-8.",
    ".zip": "Unpack it.",
    ".tar": "Unpack it.",
    ".db": "Set type to sql, with its url and table.",
    ".sqlite": "Set type to sql, with its url and table.",
}


def title(path: str) -> str:
    """The name of a file without its extensions: the prefix of task ids."""
    return unzipped_name(Path(path)).stem


def read_json_file(path: str) -> Rows:
    """The rows of a JSON file of any name. Raises ConfigError."""
    file = _file(path)
    if (kind := unzipped_name(file).suffix.lower()) in (".csv", ".tsv", *_TABLES):
        raise ConfigError(f"{path} is not a JSON file.", f"Set type to files, which reads {kind.removeprefix('.')}.")
    return _with_rows(path, [read_json(file)])


def read_files(path: str) -> Rows:
    """The rows of a file, or of all files that match a pattern, in the order of their names. Raises ConfigError."""
    files = _matching(path)
    kinds = {file: unzipped_name(file).suffix.lower() for file in files}
    if unknown := [file for file, kind in kinds.items() if kind not in _TEXT and kind not in _TABLES]:
        advice = _ADVICE.get(unknown[0].suffix.lower(), "")
        raise ConfigError(
            f"{unknown[0]} does not have the extension of a supported format.",
            advice or f"Set path to files with one of the extensions {', '.join([*_TEXT, *_TABLES])}.",
        )
    tables = [file for file, kind in kinds.items() if kind in _TABLES]
    if len(tables) == len(files) and len({*kinds.values()}) == 1:
        return _with_rows(path, [load_tables(path, _TABLES[kinds[files[0]]], files)])
    if tables:
        raise ConfigError(
            f"{path} matches files of several formats, such as {tables[0].name}.", "Name those of one format."
        )
    return _with_rows(path, [_TEXT[kind](file) for file, kind in kinds.items()])


def _with_rows(path: str, parts: Sequence[Rows]) -> Rows:
    if not any(map(len, parts)):
        raise ConfigError(f"{path} has no rows.", "Check that it is the file you mean, and that it was written whole.")
    return parts[0] if len(parts) == 1 else JoinedRows(parts)


def _matching(path: str) -> list[Path]:
    pattern = str(_expanded(path))
    if not glob.has_magic(pattern) or _exists(Path(pattern)):
        return [_file(path)]
    matches = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
    if files := [match for match in matches if match.is_file()]:
        return files
    raise ConfigError(f"No file matches {path}.", f"Check path; it is relative to the working directory {Path.cwd()}.")


def _file(path: str) -> Path:
    """The file at `path`. Raises ConfigError if there is none."""
    file = _expanded(path)
    if "://" in path:
        raise ConfigError(f"{path} is a URL, which is not fetched.", "Download the file, and set path to it.")
    if not _exists(file):
        raise ConfigError(f"There is no data file {file}.", _advice(file))
    if file.is_dir():
        raise ConfigError(
            f"{file} is a folder, not a file.",
            f"Name a file in it, or set type to files and path to {file}/*.jsonl or the like.",
        )
    return file


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: there is no user of this name.", "Write the whole path.") from error


def _exists(file: Path) -> bool:
    try:
        return file.exists()
    except OSError as error:
        raise ConfigError(f"{file} cannot be opened: {error.strerror}.", "Check the path.") from error


def _advice(file: Path) -> str:
    """What to do about a missing file: the name of a similar one, or the folder that the path begins in."""
    if glob.has_magic(str(file)):
        return "Set type to files for a pattern."
    try:
        nearby = [entry.name for entry in file.parent.iterdir()]
    except (OSError, ValueError):
        nearby = []
    where = f"; it is relative to the working directory {Path.cwd()}" if not file.is_absolute() else ""
    return did_you_mean(file.name, nearby) or f"Check path{where}."
