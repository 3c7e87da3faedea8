"""`tinsmith data` writes files that a run file can name."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tinsmith.cli import main
from tinsmith.rl.data import countdown
from tinsmith.rl.data.row_sources import Jsonl
from tinsmith.rllm import DatasetRegistry

EXAMPLE = Path(__file__).parents[2] / "examples" / "countdown" / "prepare_countdown_data.py"


def run(monkeypatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["tinsmith", "data", "countdown", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0


def test_countdown_writes_its_splits(tmp_path, monkeypatch, capsys):
    out = tmp_path / "a" / "countdown"
    run(monkeypatch, "--source", "generate", "--limit", "6", "--seed", "2", "--out", str(out))
    assert sorted(file.name for file in out.iterdir()) == ["stage2.jsonl", "stage3.jsonl", "test.jsonl", "train.jsonl"]
    assert len(Jsonl(path=str(out / "train.jsonl")).load()) == 6
    printed = capsys.readouterr().out
    assert "generated with seed 2" in printed
    assert f"{out / 'stage3.jsonl'}: 3 rows" in printed


def test_countdown_names_the_reason_for_generating(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(countdown, "_hub_problem", lambda: "the hub did not respond (ConnectError)")
    run(monkeypatch, "--limit", "2", "--out", str(tmp_path))
    assert "Countdown-Tasks-3to4 is not used: the hub did not respond (ConnectError)." in capsys.readouterr().out


def test_countdown_example_registers_the_splits(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TINSMITH_DATASETS", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["prepare", "--source", "generate", "--limit", "4"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert DatasetRegistry.get_dataset_splits("countdown") == ["train", "test", "stage2_train", "stage3_train"]
    assert len(DatasetRegistry.load_dataset("countdown", "stage3_train") or ()) == 2
    assert "generated with seed 0" in capsys.readouterr().out
