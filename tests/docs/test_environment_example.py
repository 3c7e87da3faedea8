"""The environment of docs/train/environments.md runs as it stands; its mixture is that of examples/mixture.yaml."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml

from tests.rl.scripted_run import rows, run, settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "train" / "environments.md").read_text()
PARTS = [yaml.safe_load(part) for part in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]


def test_environment_of_the_page_trains(tmp_path, monkeypatch):
    ((name, code),) = re.findall(r"```python\n# my_plugins/(parity\.py)\n(.*?)```", PAGE, re.DOTALL)
    (part,) = [part for part in PARTS if "plugins" in part and "environments" in part]
    (tmp_path / "my_plugins").mkdir()
    (tmp_path / "my_plugins" / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    try:
        run(settings(tmp_path / "run", **part, tasks={}, rewards=[], steps=2, eval={"every": 1}))
    finally:
        sys.path[:] = path
        sys.modules.pop(name.removesuffix(".py"), None)
    metrics = rows(tmp_path / "run")
    assert [row["env/parity/rollouts/failed"] for row in metrics if "env/parity/reward/mean" in row] == [0, 0]
    assert [row["eval/parity/tasks"] for row in metrics if "eval/parity/tasks" in row] == [20, 20, 20]


def test_mixture_of_the_page_is_the_example():
    example = yaml.safe_load((ROOT / "examples" / "mixture.yaml").read_text())
    first = next(part["environments"] for part in PARTS if len(part.get("environments", ())) == 3)
    for documented, run_file in zip(first, example["environments"], strict=True):
        assert documented.items() <= run_file.items()
