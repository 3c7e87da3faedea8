"""The advantage of docs/train/algorithms.md runs as it stands."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import yaml

from tests.rl.scripted_run import rows, run, settings
from tinsmith.rl.algorithms.advantages.base import Trace

PAGE = (Path(__file__).parents[2] / "docs" / "train" / "algorithms.md").read_text()


def test_advantage_of_the_page_trains(tmp_path, monkeypatch):
    ((name, code),) = re.findall(r"```python\n# my_plugins/(\w+\.py)\n(.*?)```", PAGE, re.DOTALL)
    (part,) = [part for part in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if "plugins:" in part]
    (tmp_path / "my_plugins").mkdir()
    (tmp_path / "my_plugins" / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    try:
        config = settings(tmp_path / "run", **yaml.safe_load(part), steps=2)
        for advantage, scale in ((config.algorithm.advantage, 0.5), (config.algorithm.roles["judge"].advantage, 1.0)):
            traces = [Trace(reward=reward, logprobs=np.zeros(1), turns=(1,)) for reward in (0.25, 9.0, -1.0)]
            assert advantage is not None
            (values,) = advantage.compute([traces], np.random.default_rng(0))
            assert [float(value[0]) for value in values] == [0.0, scale, -scale]
        run(config)
        assert any(row.get("optim/rows", 0) > 0 for row in rows(tmp_path / "run"))
    finally:
        sys.path[:] = path
        sys.modules.pop(name.removesuffix(".py"), None)
