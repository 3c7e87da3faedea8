"""Advantages of users: those of the workflow's turns, and those of a function of the rewards."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from tests.rl.algorithms.helpers import columns, run
from tests.rl.algorithms.test_advantages import random, trace
from tests.rl.scripted_run import REPLIES, rows, settings
from tests.rl.scripted_run import run as train
from tinsmith.errors import ConfigError
from tinsmith.rl.algorithms.advantages.user_code import CustomAdvantage, PrecomputedAdvantage
from tinsmith.rl.algorithms.algorithm import Algorithm
from tinsmith.rl.algorithms.config import AlgorithmConfig
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.rl.types import Group, Rollout, Task, Trajectory
from tinsmith.rl.workflows.conversation import Conversation
from tinsmith.testing import ScriptedSnapshot


def centered(rewards, scale=1.0):
    """Rewards of each group minus the mean of all groups."""
    mean = np.mean(np.concatenate(rewards))
    return [scale * (group - mean) for group in rewards]


def test_precomputed_advantages_are_those_of_the_turns():
    turns = trace(9.0, 3, turns=(1, 2), turn_advantages=(0.5, (1.0, -2.0)))
    ((advantages,),) = PrecomputedAdvantage().compute([[turns]], random())
    assert advantages.tolist() == [0.5, 1.0, -2.0]


@pytest.mark.parametrize(
    ("advantages", "sentence"),
    [((0.5, None), "a turn of this workflow has none"), ((0.5, (1.0,)), "A turn of 2 tokens has 1 advantage.")],
)
def test_missing_advantages_are_an_error_with_a_fix(advantages, sentence):
    with pytest.raises(ConfigError, match=sentence):
        PrecomputedAdvantage().compute([[trace(9.0, 3, turns=(1, 2), turn_advantages=advantages)]], random())


def test_advantages_of_a_conversation_reach_the_rows():
    conversation = Conversation(ScriptedSnapshot(REPLIES, np.array([0.0, 9.0, 0.0]), 0), SamplingConfig(), 1)

    async def talk() -> Rollout:
        await conversation.say("first")
        conversation.credit(1.0, advantages=0.25)
        await conversation.say("second")
        conversation.credit(advantages=[1, 2, 3, 4])
        return Rollout(trajectories=(conversation.trajectory,))

    rollout = run(talk())
    assert [turn.reward for turn in rollout.turns] == [1.0, None]
    config = AlgorithmConfig.model_validate({"type": "grpo", "advantage": {"type": "precomputed"}})
    group = Group(task=Task(id="t", messages=()), rollouts=(rollout,))
    (row,) = run(Algorithm(config, frozenset(), columns(), 0, group_size=4).score_part(1, [group])).rows
    assert row.advantages[row.mask].tolist() == [0.25] * 4 + [1, 2, 3, 4]


def test_custom_advantage_calls_the_function_for_each_role():
    advantage = {"type": "custom", "path": f"{__name__}:centered", "args": {"scale": 2.0}}
    config = AlgorithmConfig.model_validate({"type": "grpo", "advantage": advantage, "merge_replies": False})
    template = run(ScriptedSnapshot(REPLIES, np.zeros(3), 0).sample((1,), count=4, seed=1, sampling=SamplingConfig()))
    said = zip(template, ("solver", "solver", "judge", "judge"), (1.0, 0.0, 4.0, 8.0), strict=True)
    rollout = Rollout(
        trajectories=tuple(Trajectory(turns=(turn,), role=role, reward=reward) for turn, role, reward in said)
    )
    group = Group(task=Task(id="t", messages=()), rollouts=(rollout,))
    update = run(Algorithm(config, frozenset(), columns(), 0).score_part(1, [group]))
    assert [float(row.advantages[row.mask][0]) for row in update.rows] == [1.0, -1.0, -4.0, 4.0]


def test_custom_advantage_may_be_the_function_itself():
    traces = [[trace(1.0), trace(0.0)], [trace(0.5)]]
    advantages = CustomAdvantage(path=centered).compute(traces, random())
    assert [[float(value[0]) for value in values] for values in advantages] == [[0.5, -0.5], [0.0]]
    assert CustomAdvantage(path=centered).model_dump(mode="json")["path"] == f"{__name__}:centered"


@pytest.mark.parametrize("function", [lambda rewards: rewards[:1], lambda rewards: [group / 0 for group in rewards]])
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_wrong_results_of_a_custom_advantage_are_refused(function):
    with pytest.raises(ConfigError, match="Return one array for each group"):
        CustomAdvantage(path=function).compute([[trace(1.0)], [trace(1.0)]], random())


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"path": "nowhere:at_all"}, "cannot be imported"),
        ({"path": f"{__name__}:centered", "args": {"size": 3}}, "has no argument 'size'. It takes: scale"),
        ({"path": f"{__name__}:__name__"}, "is not a function"),
    ],
)
def test_wrong_paths_are_refused_when_the_file_is_read(values, sentence):
    with pytest.raises(ValueError, match=sentence):
        AlgorithmConfig.model_validate({"advantage": {"type": "custom", **values}})


def test_advantage_of_a_plugin_trains(tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    code = "from tinsmith import advantage\n\n@advantage('halved')\ndef halved(rewards, by=2):\n"
    code += "    return [(group - group.mean()) / by for group in rewards]\n"
    (folder / "halved_advantage.py").write_text(code)
    try:
        config = settings(tmp_path, plugins=str(folder), algorithm={"advantage": {"type": "halved", "by": 4}})
        assert config.algorithm.advantage == CustomAdvantage(path="halved_advantage:halved", args={"by": 4})
        roles = {"policy": {"advantage": {"type": "halved"}}}
        assert settings(tmp_path, plugins=str(folder), algorithm={"roles": roles}).algorithm.roles["policy"].advantage
        train(config)
        assert any(row.get("optim/rows", 0) > 0 for row in rows(tmp_path))
    finally:
        sys.modules.pop("halved_advantage", None)
        sys.path[:] = [path for path in sys.path if path != str(folder)]
