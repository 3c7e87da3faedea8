"""The sampling method of docs/code/extend.md, and the test of docs/train/rewards.md, run as they stand."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.rl.scripted_run import rows, run, settings
from tinsmith.errors import ConfigError
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
    assert len(BLOCKS["retried"].strip().splitlines()) < 20


def test_sampling_method_retries_cut_replies(plugins):
    space: dict = {}
    exec(BLOCKS["retried"], space)
    policy = ScriptedSnapshot(("yes", "a long reply"), np.zeros(2), 0)
    sampling = SamplingConfig(max_tokens=5)
    before = run_virtually(policy.sample([1], count=16, seed=3, sampling=sampling))
    after = run_virtually(policy.around(space["retry_cut"]).sample([1], count=16, seed=3, sampling=sampling))
    assert [len(before), len(after)] == [16, 16]
    assert 0 < sum(turn.stop == "stop" for turn in before) < sum(turn.stop == "stop" for turn in after)


@pytest.mark.parametrize("workflow", [{"type": "single_turn"}, {"type": "custom", "path": f"{__name__}:replies"}])
def test_run_with_a_sampling_method_trains(plugins, tmp_path, workflow):
    def cut(name: str, **sampling) -> list[float]:
        folder = tmp_path / name
        sampling = {"max_tokens": 4, **sampling}
        run(settings(folder, plugins=str(plugins), sampling=sampling, workflow=workflow, steps=2))
        assert all(row["rollouts/failed"] == 0 for row in rows(folder) if "reward/mean" in row)
        return [row.get("rollouts/max_response", 0) for row in rows(folder) if "reward/mean" in row]

    assert sum(cut("retried", method={"type": "retry_cut"})) < sum(cut("plain"))


async def replies(task, conversation):
    await conversation.say(*task.messages)


async def lost(request, sample, count=0):
    result = await sample(request)
    return replace(result, turns=result.turns[:count]) if count else None


def test_wrong_sampling_methods_are_refused_by_name(tmp_path):
    def method(target, **args) -> SamplingConfig:
        return SamplingConfig.model_validate({"method": {"type": "custom", "path": target, "args": args}})

    policy = ScriptedSnapshot(("yes",), np.zeros(1), 0)
    for args, message in (({}, r"lost \(.*\) returned None\."), ({"count": 1}, "returned 1 reply instead of 2")):
        with pytest.raises(ConfigError, match=message):
            run_virtually(policy.sample([1], count=2, seed=3, sampling=method(lost, **args)))
    assert len(run_virtually(policy.logprobs([1, 2]))) == 1
    with pytest.raises(ValueError, match="is not an async function; define it with async def"):
        method(method)
    with pytest.raises(ValueError, match=r"has no argument 'cuont'\. Did you mean 'count'"):
        method(lost, cuont=1)
    with pytest.raises(ValueError, match=r"it must be callable with \(request, sample\)"):
        method(other)


async def other() -> None:
    """Takes no request."""


def test_test_of_the_page_passes(plugins, monkeypatch):
    monkeypatch.syspath_prepend(str(plugins.parent))
    for name in ("my_plugins", "my_plugins.brief"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    space: dict = {}
    exec(BLOCKS["test_brief"], space)
    space["test_a_reply_that_was_cut_off_costs_a_point"]()
