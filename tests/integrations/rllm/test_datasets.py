"""Datasets and their registry on disk."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tinsmith.errors import ConfigError
from tinsmith.rllm import Dataset, DatasetRegistry

ROWS = [{"question": f"{n}?", "n": n} for n in range(5)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINSMITH_DATASETS", str(tmp_path / "datasets"))
    return tmp_path / "datasets"


def test_dataset_is_a_list_of_rows():
    data = Dataset(ROWS)
    assert (len(data), data[1], data[-1]["n"], list(data)) == (5, ROWS[1], 4, ROWS)
    assert [row["n"] for row in data.repeat(2)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [row["n"] for row in data.select(range(1, 3))] == [1, 2]
    assert data.get_data_path() is None


def test_shuffle_is_a_permutation_by_its_seed():
    data = Dataset(ROWS)
    assert sorted(row["n"] for row in data.shuffle(seed=1)) == list(range(5))
    assert data.shuffle(seed=1).data == data.shuffle(seed=1).data != data.shuffle(seed=2).data


def test_select_refuses_a_missing_row():
    with pytest.raises(IndexError):
        Dataset(ROWS).select([5])


def test_registered_split_is_loaded_as_it_was_stored(folder: Path):
    stored = DatasetRegistry.register_dataset("countdown", ROWS, split="train", source="made", description="sums")
    DatasetRegistry.register_dataset("countdown", ROWS[:2], split="test")
    loaded = DatasetRegistry.load_dataset("countdown", "train")
    assert loaded is not None
    assert loaded.data == stored.data == ROWS
    assert loaded.get_data_path() == str(folder / "countdown" / "train.jsonl")
    assert DatasetRegistry.get_dataset_names() == ["countdown"]
    assert DatasetRegistry.get_dataset_splits("countdown") == ["train", "test"]
    info = DatasetRegistry.get_dataset_info("countdown")
    assert info is not None
    assert info["metadata"] == {"source": "made", "description": "sums"}
    assert info["splits"]["test"] == {"path": "countdown/test.jsonl", "num_examples": 2, "fields": ["question", "n"]}
    assert DatasetRegistry.dataset_exists("countdown", "test")
    assert not DatasetRegistry.dataset_exists("gsm8k")


def test_missing_split_loads_as_none():
    assert DatasetRegistry.load_dataset("countdown", "train") is None
    assert DatasetRegistry.get_dataset_info("countdown") is None
    assert DatasetRegistry.get_dataset_splits("countdown") == []


def test_splits_and_datasets_can_be_removed(folder: Path):
    for split in ("train", "test"):
        DatasetRegistry.register_dataset("countdown", ROWS, split)
    assert DatasetRegistry.remove_dataset_split("countdown", "test")
    assert not DatasetRegistry.remove_dataset_split("countdown", "test")
    assert not (folder / "countdown" / "test.jsonl").exists()
    assert DatasetRegistry.remove_dataset("countdown")
    assert not DatasetRegistry.remove_dataset("countdown")
    assert not (folder / "countdown").exists()


def test_registering_again_replaces_the_rows():
    DatasetRegistry.register_dataset("countdown", ROWS, "train")
    DatasetRegistry.register_dataset("countdown", ROWS[:1], "train")
    loaded = DatasetRegistry.load_dataset("countdown", "train")
    assert loaded is not None
    assert loaded.data == ROWS[:1]


def test_registrations_at_the_same_time_are_all_kept():
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: DatasetRegistry.register_dataset(f"set{n}", ROWS, "train"), range(8)))
    assert DatasetRegistry.get_dataset_names() == [f"set{n}" for n in range(8)]


@pytest.mark.parametrize("name", ["../up", "", "a/b", ".hidden"])
def test_names_that_leave_the_folder_are_refused(name: str):
    with pytest.raises(ConfigError, match="cannot name a folder"):
        DatasetRegistry.register_dataset(name, ROWS, "train")


def test_rows_that_json_cannot_hold_are_refused(folder: Path):
    with pytest.raises(ConfigError, match="countdown/train, row 1 cannot be stored"):
        DatasetRegistry.register_dataset("countdown", [ROWS[0], {"image": b"png"}], "train")
    assert not (folder / "countdown" / "train.jsonl").exists()


def test_damaged_registry_is_named(folder: Path):
    folder.mkdir(parents=True)
    (folder / "registry.json").write_text("{")
    with pytest.raises(ConfigError, match=r"registry\.json is not valid JSON"):
        DatasetRegistry.get_dataset_names()


def test_files_load_by_their_extension(tmp_path: Path):
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "rows.csv").write_text("question,n\n0?,0\n")
    assert Dataset.load_data(tmp_path / "rows.json").data == ROWS
    assert Dataset.load_data(str(tmp_path / "rows.jsonl")).data == ROWS
    assert Dataset.load_data(tmp_path / "rows.csv").data == [{"question": "0?", "n": "0"}]
    with pytest.raises(ConfigError, match="no data file"):
        Dataset.load_data(tmp_path / "none.json")


def test_hugging_face_datasets_can_be_registered():
    datasets = pytest.importorskip("datasets")
    DatasetRegistry.register_dataset("hub", datasets.Dataset.from_list(ROWS), "train")
    loaded = DatasetRegistry.load_dataset("hub", "train")
    assert loaded is not None
    assert loaded.data == ROWS
