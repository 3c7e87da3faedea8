"""Rows that the datasets package loads: Parquet and Arrow files, and datasets of the Hugging Face hub.

Text files of a dataset (JSON, CSV) are read as other text files are, because the package converts their values.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from tinsmith.errors import ConfigError, Unreachable
from tinsmith.rl.data.files.csv_rows import read_csv
from tinsmith.rl.data.files.json_rows import read_json
from tinsmith.rl.data.files.text import first_bytes, refuse_other_kinds
from tinsmith.rl.data.rows import JoinedRows, Row, Rows

_READERS = {"json": read_json, "csv": read_csv}


class TableRows(Rows):
    """Rows of a dataset of the datasets package."""

    def __init__(self, label: str, dataset: Any, missing: Collection[str] = ()) -> None:
        self._label, self._dataset = label, dataset
        self._missing = dict.fromkeys(missing)

    @override
    def __len__(self) -> int:
        return len(self._dataset)

    @override
    def __iter__(self) -> Iterator[Row]:
        return ({**self._missing, **row} for row in self._dataset)

    @override
    def row(self, index: int) -> Row:
        return {**self._missing, **self._dataset[index]}

    @override
    def place(self, index: int) -> str:
        return f"{self._label}, row {index + 1}"

    @override
    def narrowed(self, fields: Collection[str]) -> Rows:
        features = self._dataset.features
        columns = [name for name in features if name in fields and not _is_heavy(repr(features[name]))]
        if not columns:
            return self
        others = features.keys() - set(columns)
        return TableRows(self._label, self._dataset.select_columns(columns), others)


def _is_heavy(feature: str) -> bool:
    """Whether values of a feature, written as Python code, are images or other media, which a quick look leaves out."""
    nested_bytes = "'binary'" in feature and not feature.startswith("Value(")
    return nested_bytes or bool(re.search(r"\b(Image|Audio|Video|Pdf)\(", feature))


def load_tables(label: str, format_name: str, files: Sequence[Path]) -> Rows:
    """The rows of files of one format, parquet or arrow, in the order of the files."""
    load = _package(label).load_dataset
    if format_name == "parquet":
        from pyarrow.parquet import read_metadata

        for file in files:
            refuse_other_kinds(file, first_bytes(file), but=b"PAR1")
        if not sum(_loaded(str(file), read_metadata, file).num_rows for file in files):  # names the damaged one
            return JoinedRows([])
    paths = [str(file) for file in files]
    return TableRows(label, _loaded(label, load, format_name, data_files=paths, split="train"))


def load_named(label: str, name: str, subset: str | None, split: str) -> Rows:
    """The rows of a split of a dataset of the hub, or of a folder with the layout of one."""
    if name.startswith(("/", ".", "~")) and not Path(name).is_dir():
        raise ConfigError(f"There is no folder {name}.", "Name a folder with data files, or a dataset of the hub.")
    package = _package(label)
    builder = _loaded(label, package.load_dataset_builder, name, subset)
    kind, config = type(builder).__module__.rpartition(".")[2], builder.config
    if kind in _READERS and config.data_files and not (kind == "json" and config.field):
        return _text_rows(label, package, config.data_files, kind, split)
    return TableRows(label, _loaded(label, package.load_dataset, name, subset, split=split))


def _text_rows(label: str, package: Any, data_files: Mapping[Any, Sequence[str]], kind: str, split: str) -> Rows:
    files = {str(name): paths for name, paths in data_files.items()}
    named = {name: paths for name, paths in files.items() if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", split)}
    download = package.DownloadManager().download
    rows = {
        name: JoinedRows([_READERS[kind](Path(file)) for file in _loaded(label, download, list(paths))])
        for name, paths in named.items()
    }
    if split in rows:
        return rows[split]
    lengths = {name: len(part) for name, part in rows.items()}
    try:
        parts = package.ReadInstruction.from_spec(split).to_absolute(lengths)
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"{label} has no split {split}.", f"Its splits are: {', '.join(files)}.") from error
    return JoinedRows([rows[part.splitname][part.from_ : part.to] for part in parts])


def _package(label: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"{label} needs the datasets package.", "Run pip install 'tinsmith[hub]'.") from error
    return datasets


def _loaded(label: str, load: Any, *arguments: Any, **options: Any) -> Any:
    """The result of `load`. Raises ConfigError if it fails, Unreachable without a network or credentials."""
    try:
        return load(*arguments, **options)
    except Exception as error:
        reason = error
        while (reason.__cause__ or reason.__context__) and type(reason).__name__.startswith("DatasetGeneration"):
            reason = reason.__cause__ or reason.__context__ or reason
        text = (str(reason).strip() or type(reason).__name__).splitlines()[0].rstrip(".")
        if isinstance(error, ConnectionError) or "gated dataset" in text:
            hint = "Check the network, the name, and the access that hf auth login gives; a local folder needs none."
            raise Unreachable(f"The dataset {label} cannot be reached: {text}.", hint) from error
        raise ConfigError(
            f"Cannot load the dataset {label}: {text}.", "Check its path or name, and that it is complete."
        ) from error
