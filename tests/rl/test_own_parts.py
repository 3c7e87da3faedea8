"""Each part of one's own of docs/code/extend.md runs as it stands, from a run file and as an object of Python."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.rl.scripted_run import rows, run, settings
from tinsmith.rl.plugin_files import custom_parts, described_parts

PAGE = (Path(__file__).parents[2] / "docs" / "code" / "extend.md").read_text()
SECTION = PAGE.partition("## Parts of your own")[2].partition("\n## ")[0]
FILES = dict(re.findall(r"```python\n# my_plugins/(\w+)\.py\n(.*?)```", SECTION, re.DOTALL))
(RUN_FILE,) = re.findall(r"```yaml\n(plugins:.*?)```", SECTION, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with the files of the page."""
    (tmp_path / "my_plugins").mkdir()
    for name, code in FILES.items():
        (tmp_path / "my_plugins" / f"{name}.py").write_text(code)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name, None)


def test_each_part_of_the_page_is_short():
    parts = [part for code in FILES.values() for part in re.split(r"\n\n\n(?=@)", code.strip())]
    assert max(len(part.splitlines()) for part in parts) < 20


def test_run_with_all_parts_of_the_page(folder, capsys):
    config = settings(folder / "run", **yaml.safe_load(RUN_FILE), steps=4)
    listed = [part.kind for _, part in custom_parts(config)]
    assert sorted(listed) == [
        "advantage", "algorithm", "callback", "evaluation", "filter", "loss", "monitor", "order", "source",
    ]  # fmt: skip
    assert "loss at algorithm.loss: clipped:clipped, my_plugins/clipped.py:5" in described_parts(config)
    run(config)
    written = rows(folder / "run")
    assert [row["eval/greeting/length"] > 0 for row in written if "eval/greeting/length" in row] == [True] * 3
    assert any("optim/beyond" in row and row["optim/steps"] == 2 for row in written)
    of_steps = [row for row in written if "reward/mean" in row]  # evaluations have rows of their own
    assert len((folder / "run" / "rewards.txt").read_text().splitlines()) == len(of_steps) == config.steps
    assert "weights of" in capsys.readouterr().out
    first = json.loads((folder / "run" / "rollouts" / "train-000001.jsonl").read_text().splitlines()[0])
    assert first["task"].startswith("squares/")


def test_callback_of_the_page_ends_a_run(folder):
    values = {**yaml.safe_load(RUN_FILE), "callbacks": [{"type": "enough", "reward": -1e9}], "filters": []}
    config = settings(folder / "run", **values, steps=4)
    assert run(config).step == 1
    assert run(config).step == 1  # a finished run is left as it is


def test_parts_may_be_objects_of_python(folder):
    def steps_by_name(metrics, step):
        seen.append(step)

    seen: list[int] = []
    sys.path.append("my_plugins")
    import clipped  # type: ignore[import-not-found]
    import curriculum  # type: ignore[import-not-found]

    config = settings(
        folder / "run",
        tasks={"train": curriculum.squares, "held_out": 2, "order": curriculum.smallest_first},
        algorithm={"loss": clipped.clipped},
        filters=[curriculum.varied],
        callbacks=[steps_by_name],
        monitors=[lambda step, metrics: None],
        steps=2,
    )
    run(config)
    assert seen == [1, 2]
