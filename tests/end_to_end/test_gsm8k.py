"""examples/gsm8k: rows, reports of finished runs, and (slow) all four runs with a tiny model."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.integrations.trinity.files import TINKER, VERL
from tinsmith.dialects import read_run
from tinsmith.rl.rewards.format import Format
from tinsmith.rl.rewards.mathematics import Math
from tinsmith.rl.types import Message, Task

FOLDER = Path(__file__).parents[2] / "examples" / "gsm8k"
ROW = {
    "question": "Ann sold 48 clips in April and half as many in May. How many in all?",
    "answer": "In May she sold 48/2 = <<48/2=24>>24 clips.\nIn all 48+24 = <<48+24=72>>72.\n#### 72",
}
TASK = Task(id="gsm8k/0", messages=(Message(role="user", content=ROW["question"]),), answer=ROW["answer"])


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    """Import from the folder of the example."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def imported(name: str) -> ModuleType:
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return imported


@pytest.mark.parametrize("file", [TINKER, VERL], ids=lambda file: file.stem)
def test_trinity_files_equal_the_published_ones(file: Path):
    assert (FOLDER / file.name).read_bytes() == file.read_bytes()


def test_demonstrations_have_the_rewarded_format(example):
    rows = example("rows")
    assert rows.is_short(ROW)
    assert not rows.is_short({**ROW, "answer": "long " * 100 + ROW["answer"]})
    form = read_run(FOLDER / "smollm2.yaml").settings.rewards[0]
    assert isinstance(form, Format)
    marked, tagged = rows.marked(ROW)["reply"], rows.tagged(ROW)["reply"]
    assert marked.endswith("48+24 = 72.\n#### 72")
    assert form.score(TASK, marked) == 1
    assert Math().score(TASK, tagged).parts == {"accuracy": 1.0, "format": 0.1}


@pytest.mark.parametrize(
    "loophole",
    [
        "#### 10",
        "#### 10 #### 10",
        "1 + 1 = 2\n#### 2 #### 2",
        "1 + 1 = 2\n#### 2\n#### 2",
        "1 + 1 = 2\n#### 2 and more",
        "1 + 1 = 2 #### 2",
        "There are 2\n#### 2",
        "#### 2\n1 + 1 = 2",
    ],
)
def test_strict_format_rejects(loophole: str):
    form = read_run(FOLDER / "smollm2.yaml").settings.rewards[0]
    assert isinstance(form, Format)
    assert form.score(TASK, "1 + 1 = 2\n#### 2") == 1
    assert form.score(TASK, loophole) == 0


def finished(folder: Path, rewards: list[float]) -> None:
    """A run in two stages; the second has these rewards."""
    stage = folder / "02-rewarded"
    (stage / "rollouts").mkdir(parents=True)
    (folder / "stages.json").write_text("{}")
    lines = [
        {
            "step": step,
            "reward/mean": reward,
            "reward/std": 0.1,
            "reward/math/format": reward,
            "reward/math/accuracy": 0.0,
            "tokens/reply": 10.0,
            "tokens/sampled": 160,
            "time/step": 30.0,
        }
        for step, reward in enumerate(rewards, 1)
    ]
    (stage / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in (1, len(rewards)):
        rollout = {
            "step": step,
            "index": 0,
            "text": f"reply of step {step}",
            "reward": -0.1,
            "answer": "It is so.\n#### 72",
        }
        (stage / "rollouts" / f"train-{step:06}.jsonl").write_text(json.dumps(rollout) + "\n")


def test_report_compares_finished_runs(example, tmp_path: Path):
    curves = example("curves")
    finished(tmp_path / "tinker", [-0.1] * 5 + [0.1] * 5)
    finished(tmp_path / "verl", [-0.1] * 5 + [0.0] * 5)
    report = curves.report(tmp_path)
    assert "| 10 | 5 | -0.100 → 0.100 | 0.000 → 1.000 | 0.000 → 0.000 | 10 → 10 | - | - |" in report
    assert "differ by +0.050 in the mean and by 0.050 at a step" in report
    assert "the standard error of one step's reward is 0.025" in report  # 0.1 of 16 answers
    assert '- "reply of step 10" (reward -0.1; right is 72)' in report


def test_pictures_are_drawn_for_existing_runs(example, tmp_path: Path):
    finished(tmp_path / "tinker", [-0.1, 0.1])
    (tmp_path / "verl").mkdir()
    example("curves").draw_all(tmp_path)
    assert [file.name for file in tmp_path.glob("*.png")] == ["gsm8k.png"]
    assert (tmp_path / "gsm8k.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_all_four_runs_write_pictures_and_numbers(tmp_path: Path, tiny_llama: Path):
    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", "test"):
        rows = [{**ROW, "question": f"{split} {number}: {ROW['question']}"} for number in range(20)]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = (
        "--steps=2",
        "--sft-steps=1",
        "--groups=2",
        "--size=2",
        "--max-tokens=4",
        "--sums=2",
        f"--model={tiny_llama}",
    )
    about = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(FOLDER / "compare.py"), str(data), f"--out={tmp_path / 'out'}", *small]
    for _ in range(2):  # the second call finds complete runs
        done = subprocess.run(command, env=about, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "out"
    assert {file.name for file in out.glob("*.png")} == {"gsm8k.png", "smollm2.png", "arithmetic.png"}
    assert len(re.findall(r"^\| .* \| 2 \| ", (out / "numbers.md").read_text(), re.MULTILINE)) == 4
