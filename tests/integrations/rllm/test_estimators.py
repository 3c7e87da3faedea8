"""Estimators that a script registers: their advantages, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.integrations.rllm.test_trainer import config, trainer
from tinsmith.errors import ConfigError
from tinsmith.rl.algorithms.advantages.base import Trace
from tinsmith.rllm import register_rllm_adv_estimator


def scaled(
    rewards: list[np.ndarray], algorithm_config: Any = None, **_: Any
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    scale = 2.0 if algorithm_config.norm_adv_by_std_in_grpo else 1.0
    return [scale * (group - group.max()) for group in rewards], rewards


@pytest.fixture
def script() -> Iterator[ModuleType]:
    """A loaded module, as the user's script is."""
    module = ModuleType("script_of_a_user")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_registered_estimator_computes_the_advantages(script: ModuleType, tmp_path: Path):
    vars(script)["scaled"] = register_rllm_adv_estimator("scaled_from_best")(scaled)
    algorithm = {"adv_estimator": "scaled_from_best", "norm_adv_by_std_in_grpo": True}
    advantage = trainer(tmp_path, config=config(tmp_path, algorithm=algorithm)).run_config.algorithm.advantage
    traces = [
        [Trace(reward=reward, logprobs=np.zeros(2), turns=(2,)) for reward in group] for group in ((1, 0), (3, 5))
    ]
    values = advantage.compute(traces, np.random.default_rng(0))
    assert [[each.tolist() for each in group] for group in values] == [[[0, 0], [-2, -2]], [[-4, -4], [0, 0]]]
    assert advantage.model_dump(mode="json")["path"].endswith("test_estimators:scaled")


def test_estimator_of_one_role(script: ModuleType, tmp_path: Path):
    vars(script)["scaled"] = register_rllm_adv_estimator("scaled_from_best")(scaled)
    settings = trainer(tmp_path, traj_group_adv_estimator_map={"solver": "scaled_from_best"}).run_config
    advantage = settings.algorithm.roles["solver"].advantage
    assert advantage is not None
    assert (advantage.type, settings.algorithm.advantage.type) == ("custom", "grpo")


def test_estimators_that_cannot_be_used_are_refused(script: ModuleType, tmp_path: Path):
    def grouped(rewards: list[np.ndarray], traj_groups: Any) -> list[np.ndarray]:
        return rewards

    vars(script)["grouped"] = register_rllm_adv_estimator("grouped")(grouped)
    with pytest.raises(ConfigError, match="takes traj_groups, which is not available"):
        trainer(tmp_path)
    for name in ("grouped", "other"):
        vars(script)[name] = register_rllm_adv_estimator("twice")(lambda rewards: rewards)
    with pytest.raises(ConfigError, match="Two functions are registered as the estimator twice"):
        trainer(tmp_path)


def test_unknown_estimator_is_refused(tmp_path: Path):
    values = config(tmp_path, algorithm={"adv_estimator": "scaled_by_best"})
    with pytest.raises(ConfigError, match="adv_estimator"):
        trainer(tmp_path, config=values)
