"""The sampling method of docs/code/extend.md, and the test of docs/train/rewards.md, run as they stand."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.rl.scripted_run import rows, run, settings
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.testing import ScriptedSnapshot, run_virtually

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"```python\n# (?:my_plugins/)?(\w+)\.py\n(.*?)```", re.DOTALL)
BLOCKS = dict(BLOCK.findall((DOCS / "code" / "extend.md").read_text() + (DOCS / "train" / "rewards.md").read_text()))


@pytest.fixture
def plugins(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "my_plugins"
    folder.mkdir()
    for name in ("retried", "brief"):
        (folder / f"{name}.py").write_text(BLOCKS[name])
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return folder


def test_sampling_method_is_one_short_function():
    assert len(BLOCKS["retried"].split("@workflow")[0].strip().splitlines()) < 20


def test_sampling_method_retries_cut_replies(plugins):
    space: dict = {}
    exec(BLOCKS["retried"], space)
    policy = ScriptedSnapshot(("yes", "a long reply"), np.zeros(2), 0)
    sampling = SamplingConfig(max_tokens=5)
    before = run_virtually(policy.sample([1], count=16, seed=3, sampling=sampling))
    after = run_virtually(policy.around(space["retry_cut"]).sample([1], count=16, seed=3, sampling=sampling))
    assert [len(before), len(after)] == [16, 16]
    assert 0 < sum(turn.stop == "stop" for turn in before) < sum(turn.stop == "stop" for turn in after)


def test_workflow_with_a_sampling_method_trains(plugins, tmp_path):
    run(settings(tmp_path / "run", plugins=str(plugins), workflow={"type": "retried"}, steps=1))
    assert all(row["rollouts/failed"] == 0 for row in rows(tmp_path / "run") if "reward/mean" in row)


def test_test_of_the_page_passes(plugins, monkeypatch):
    monkeypatch.syspath_prepend(str(plugins.parent))
    for name in ("my_plugins", "my_plugins.brief"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    space: dict = {}
    exec(BLOCKS["test_brief"], space)
    space["test_a_reply_that_was_cut_off_costs_a_point"]()
