"""Datasets under the names of rLLM: Dataset, a list of rows, and DatasetRegistry, which stores them by name and split.

A registered split is a JSON Lines file, NAME/SPLIT.jsonl in the folder of the registry: $TINSMITH_DATASETS, else
~/.tinsmith/datasets. Its registry.json describes all splits.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, overload

from typing_extensions import override

from tinsmith.atomic import atomic_write
from tinsmith.errors import ConfigError
from tinsmith.rl.data.files.paths import read_files

Row = dict[str, Any]

REGISTRY = "registry.json"


class Dataset(Sequence[Row]):
    """Rows, with the name and split under which they are registered, if they are."""

    def __init__(self, data: Iterable[Mapping[str, Any]], name: str | None = None, split: str | None = None) -> None:
        self.data: list[Row] = [dict(row) for row in data]
        self.name, self.split = name, split

    @override
    def __len__(self) -> int:
        return len(self.data)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    @override
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        return self.data[index]

    def get_data(self) -> list[Row]:
        """All rows."""
        return self.data

    def repeat(self, n: int) -> Dataset:
        """Each row `n` times in succession."""
        if n < 1:
            raise ConfigError(f"A dataset cannot be repeated {n} times.", "Pass a positive number.")
        return Dataset([row for row in self.data for _ in range(n)], self.name, self.split)

    def shuffle(self, seed: int = 0) -> Dataset:
        """The rows in a random order, the same for equal seeds."""
        return Dataset(Random(seed).sample(self.data, len(self.data)), self.name, self.split)

    def select(self, indices: Iterable[int]) -> Dataset:
        """The rows at `indices`. Raises IndexError for an index beyond the last row."""
        return Dataset([self.data[index] for index in indices], self.name, self.split)

    def get_data_path(self) -> str | None:
        """Path of the registered file; None if the dataset is not registered."""
        if self.name is None or self.split is None:
            return None
        entry = _entry(_read_registry(), self.name).get("splits", {}).get(self.split)
        return str(registry_folder() / entry["path"]) if entry else None

    @classmethod
    def load_data(cls, path: str | Path) -> Dataset:
        """The rows of a json, jsonl, csv, parquet or arrow file. Raises ConfigError."""
        return cls(read_files(str(path)))


class DatasetRegistry:
    """Datasets on disk, by name and split."""

    @classmethod
    def register_dataset(
        cls,
        name: str,
        data: Iterable[Mapping[str, Any]],
        split: str = "default",
        source: str | None = None,
        description: str | None = None,
        category: str | None = None,
    ) -> Dataset:
        """Store rows as `split` of the dataset `name`, in place of an earlier one, and return them.

        `data` is a list of rows or a Hugging Face dataset. Raises ConfigError for a row that JSON cannot hold.
        """
        for part in (name, split):
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", part):
                raise ConfigError(f"{part!r} cannot name a folder.", "Use letters, digits and . _ -")
        dataset = Dataset(data, name, split)
        if not dataset.data:
            raise ConfigError(f"{name}/{split} has no rows.", "Pass at least one row.")
        path = Path(name) / f"{split}.jsonl"
        with _registry() as (folder, registry):
            (folder / name).mkdir(exist_ok=True)
            lines = (_line(row, f"{name}/{split}, row {number}") for number, row in enumerate(dataset.data))
            atomic_write(folder / path, b"".join(lines))
            entry = registry["datasets"].setdefault(name, {"metadata": {}, "splits": {}})
            fields = list(dataset.data[0])
            entry["splits"][split] = {"path": str(path), "num_examples": len(dataset), "fields": fields}
            metadata = {"source": source, "description": description, "category": category}
            entry["metadata"] |= {key: value for key, value in metadata.items() if value is not None}
        return dataset

    @classmethod
    def load_dataset(cls, name: str, split: str = "default") -> Dataset | None:
        """The rows of a split; None if it is not registered."""
        entry = _entry(_read_registry(), name).get("splits", {}).get(split)
        if entry is None:
            return None
        return Dataset(Dataset.load_data(registry_folder() / entry["path"]), name, split)

    @classmethod
    def dataset_exists(cls, name: str, split: str | None = None) -> bool:
        """Whether the dataset, or this split of it, is registered."""
        entry = _entry(_read_registry(), name)
        return bool(entry) if split is None else split in entry.get("splits", {})

    @classmethod
    def get_dataset_names(cls) -> list[str]:
        """The names of all registered datasets."""
        return sorted(_read_registry()["datasets"])

    @classmethod
    def get_dataset_splits(cls, name: str) -> list[str]:
        """The splits of a dataset; empty if it is not registered."""
        return list(_entry(_read_registry(), name).get("splits", {}))

    @classmethod
    def get_dataset_info(cls, name: str) -> dict[str, Any] | None:
        """`metadata`, and path, number of rows and fields of each of `splits`; None if it is not registered."""
        entry = _entry(_read_registry(), name)
        return {"name": name, **entry} if entry else None

    @classmethod
    def remove_dataset(cls, name: str) -> bool:
        """Delete a dataset with its files. Returns whether it was registered."""
        with _registry() as (folder, registry):
            if registry["datasets"].pop(name, None) is None:
                return False
            shutil.rmtree(folder / name, ignore_errors=True)
            return True

    @classmethod
    def remove_dataset_split(cls, name: str, split: str) -> bool:
        """Delete a split with its file. Returns whether it was registered."""
        with _registry() as (folder, registry):
            entry = _entry(registry, name).get("splits", {}).pop(split, None)
            if entry is None:
                return False
            (folder / entry["path"]).unlink(missing_ok=True)
            if not registry["datasets"][name]["splits"]:
                del registry["datasets"][name]
                shutil.rmtree(folder / name, ignore_errors=True)
            return True


def registry_folder() -> Path:
    """The folder of the registry."""
    return Path(os.environ.get("TINSMITH_DATASETS", "") or "~/.tinsmith/datasets").expanduser()


def _read_registry() -> dict[str, Any]:
    file = registry_folder() / REGISTRY
    if not file.is_file():
        return {"version": 1, "datasets": {}}
    try:
        return dict(json.loads(file.read_bytes()))
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}.", "Restore it, or delete it.") from error


@contextmanager
def _registry() -> Iterator[tuple[Path, dict[str, Any]]]:
    """(folder, registry) to change; written after the block. One process at a time."""
    folder = registry_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        registry = _read_registry()
        yield folder, registry
        atomic_write(folder / REGISTRY, json.dumps(registry, indent=1).encode())


def _entry(registry: Mapping[str, Any], name: str) -> dict[str, Any]:
    return registry["datasets"].get(name, {})


def _line(row: Row, place: str) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"
    except TypeError as error:
        raise ConfigError(f"{place} cannot be stored as JSON: {error}.", "Convert the value to text.") from error
