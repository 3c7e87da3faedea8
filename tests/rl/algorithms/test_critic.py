"""The critic: bins say what they were taught, and a run with one learns at group size 1."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rl.scripted_run import rows as metric_rows
from tests.rl.scripted_run import run, settings
from tinsmith.rl.algorithms.critic import Bins, Critic, CriticConfig, value_metrics
from tinsmith.rl.optimizer import OptimizerConfig
from tinsmith.rl.policy.scripted import ScriptedAuxiliaryAdapter
from tinsmith.rl.policy.training_rows import TrainingRow


def sample(text: str, returns: float, values: float = 0.0) -> TrainingRow:
    ids = np.array([ord(letter) for letter in text])
    length = len(ids) - 1
    return TrainingRow(
        tokens=ids[:-1],
        targets=ids[1:],
        logprobs=np.zeros(length, np.float32),
        advantages=np.ones(length, np.float32),
        mask=np.arange(length) > 0,
        columns={"returns": np.full(length, returns, np.float32), "values": np.full(length, values, np.float32)},
    )


def normal(edge: float, mean: float, deviation: float) -> float:
    return 0.5 * (1 + math.erf((edge - mean) / (deviation * math.sqrt(2))))


@given(st.floats(-2, 3))
def test_a_target_is_a_gaussian_cut_into_bins(value):
    bins = Bins.from_config(CriticConfig(bins=8, low=-1.0, high=2.5))
    (target,) = bins.targets(np.array([value]))
    width, mean = 0.5, min(max(value, -1.0), 2.5)
    mass = [normal(c + width / 2, mean, 0.75 * width) - normal(c - width / 2, mean, 0.75 * width) for c in bins.centers]
    assert target.tolist() == pytest.approx([one / sum(mass) for one in mass])
    assert target.sum() == pytest.approx(1.0)


@given(st.floats(0.0, 1.0))
def test_a_value_in_the_middle_is_read_as_it_was_taught(value):
    bins = Bins.from_config(CriticConfig())
    (read,) = bins.values(np.log(bins.targets(np.array([value])) + 1e-30))
    assert read == pytest.approx(value, abs=2e-3)


def test_only_the_chances_among_the_bins_count():
    bins = Bins.from_config(CriticConfig(bins=2, low=0.0, high=1.0))
    assert bins.values(np.array([[-20.0, -20.0], [-9.0, -9.0 + math.log(3)]])).tolist() == pytest.approx([0.5, 0.75])


def test_it_learns_what_is_returned_and_says_how_much_it_explained(tmp_path):
    critic = Critic(
        CriticConfig(optimizer=OptimizerConfig(learning_rate=10.0)), ScriptedAuxiliaryAdapter(tmp_path), 100
    )
    rows = [sample("abc", 1.0), sample("xyz", 0.0)]

    async def teach():
        for step in range(1, 101):
            await critic.learn(step, rows)
        return await critic.values(rows)

    first, second = asyncio.run(teach())
    assert first[1] == pytest.approx(1.0, abs=0.05)
    assert second[1] == pytest.approx(0.0, abs=0.05)
    assert first[0] == pytest.approx(0.5, abs=0.1)  # not taught: outside of the mask
    good = [sample("abc", 1.0, 0.9), sample("xyz", 0.0, 0.1)]
    assert value_metrics(good)["critic/explained_variance"] == pytest.approx(1 - 0.01 / 0.25)
    assert value_metrics(rows[:1])["critic/explained_variance"] == 0.0


class Watched(ScriptedAuxiliaryAdapter):
    """Keeps what it was asked for and taught."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked, self.weights = 0, []

    async def logprobs(self, rows, ids):
        self.asked += 1
        return await super().logprobs(rows, ids)

    async def fit(self, rows, ids, weights, optimizer, learning_rate):
        self.weights += weights
        return await super().fit(rows, ids, weights, optimizer, learning_rate)


def test_chances_of_the_rest_of_the_vocabulary_are_left_alone(tmp_path):
    learner = Watched(tmp_path)
    critic = Critic(CriticConfig(bins=4, low=0.0, high=3.0), learner, 1)
    asyncio.run(critic.learn(1, [sample("abc", 2.0)]))
    (weights,) = learner.weights
    assert weights.sum(axis=1).tolist() == pytest.approx([0.0, 0.0], abs=1e-7)
    assert weights[0].tolist() == [0.0] * 4  # outside of the mask
    assert weights[1].tolist() == pytest.approx(critic._bins.targets(np.array([2.0]))[0] - 0.25, abs=1e-7)


def test_nobody_is_asked_twice_by_the_same_weights(tmp_path):
    learner = Watched(tmp_path)
    critic = Critic(CriticConfig(epochs=2), learner, 1)
    rows = [sample("abc", 1.0)]

    async def step():
        await critic.values(rows)
        return await critic.learn(1, rows)

    first = asyncio.run(step())["critic/loss"]
    assert learner.asked == 2  # for the values, and again before the second update
    assert asyncio.run(step())["critic/loss"] < first


def test_a_bound_keeps_returns_near_what_was_told(tmp_path):
    critic = Critic(CriticConfig(clip=0.25), ScriptedAuxiliaryAdapter(tmp_path), 1)
    assert critic._bounded(sample("ab", 1.0, 0.5)).tolist() == [0.75]


def ppo(**more):
    critic = {"bins": 16, "optimizer": {"learning_rate": 20.0}, **more.pop("critic", {})}
    algorithm = {"type": "ppo", "kl": {"type": "none", "coef": 0.0}, "critic": critic}
    return {"algorithm": algorithm, "group_size": 1, "groups_per_step": 8, **more}


def test_a_run_with_a_critic_learns_at_group_size_1(tmp_path):
    state = run(settings(tmp_path / "run", **ppo(steps=30, optimizer={"learning_rate": 0.5})))
    numbers = metric_rows(tmp_path / "run")
    assert state.critic_path
    trained = [row for row in numbers if "critic/explained_variance" in row]
    assert len(trained) == 30
    assert trained[-1]["reward/mean"] > trained[0]["reward/mean"]
    assert np.mean([row["reward/mean"] for row in trained[-5:]]) > 0.8


def test_the_policy_waits_until_the_critic_is_warm(tmp_path):
    run(settings(tmp_path / "run", **ppo(steps=4, critic={"warmup_steps": 3})))
    trained = [row for row in metric_rows(tmp_path / "run") if "critic/loss" in row]
    assert [row.get("optim/skipped", 0.0) for row in trained] == [1.0, 1.0, 1.0, 0.0]


def test_a_broken_off_run_goes_on_with_its_critic(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(settings(whole, **ppo(steps=6, checkpoint={"every": 3})))
    run(settings(broken, **ppo(steps=3, checkpoint={"every": 3})))
    run(settings(broken, **ppo(steps=6, checkpoint={"every": 3})))
    after = [[row for row in metric_rows(one) if row["step"] > 3 and "critic/loss" in row] for one in (whole, broken)]
    assert after[0] == after[1]


@pytest.mark.parametrize(
    ("algorithm", "what"),
    [
        ({"type": "ppo", "critic": None}, "wants a critic"),
        ({"type": "grpo", "critic": {}}, "wants no critic"),
        ({"type": "ppo", "critic": {"low": 1.0, "high": 1.0}}, "not above"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, algorithm, what):
    with pytest.raises(ValueError, match=what):
        settings(tmp_path, algorithm=algorithm)
