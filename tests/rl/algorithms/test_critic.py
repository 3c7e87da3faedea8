"""The critic's bins encode returns, and a run with a critic learns at group size 1."""

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
from tinsmith.rl.policy.training_rows import TrainingRow
from tinsmith.testing import ScriptedAuxiliaryAdapter


def sample(text: str, returns: float, values: float = 0.0) -> TrainingRow:
    """A row of `text` with one return for every token; its first token is outside of the mask."""
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
    """Cumulative normal distribution at `edge`."""
    return 0.5 * (1 + math.erf((edge - mean) / (deviation * math.sqrt(2))))


@given(st.floats(-2, 3))
def test_target_is_a_gaussian_cut_into_bins(value):
    bins = Bins.from_config(CriticConfig(bins=8, low=-1.0, high=2.5))
    (target,) = bins.targets(np.array([value]))
    width, mean = 0.5, min(max(value, -1.0), 2.5)
    mass = [normal(c + width / 2, mean, 0.75 * width) - normal(c - width / 2, mean, 0.75 * width) for c in bins.centers]
    assert target.tolist() == pytest.approx([value / sum(mass) for value in mass])
    assert target.sum() == pytest.approx(1.0)


@given(st.floats(0.0, 1.0))
def test_value_of_a_target_equals_its_return(value):
    bins = Bins.from_config(CriticConfig())
    (read,) = bins.values(np.log(bins.targets(np.array([value])) + 1e-30))
    assert read == pytest.approx(value, abs=2e-3)


def test_values_use_relative_probabilities_of_the_bins():
    bins = Bins.from_config(CriticConfig(bins=2, low=0.0, high=1.0))
    assert bins.values(np.array([[-20.0, -20.0], [-9.0, -9.0 + math.log(3)]])).tolist() == pytest.approx([0.5, 0.75])


def test_critic_learns_returns_and_reports_explained_variance(tmp_path):
    critic = Critic(
        CriticConfig(optimizer=OptimizerConfig(learning_rate=10.0)), ScriptedAuxiliaryAdapter(tmp_path), 100
    )
    rows = [sample("abc", 1.0), sample("xyz", 0.0)]

    async def train():
        for step in range(1, 101):
            await critic.learn(step, rows)
        return await critic.values(rows)

    first, second = asyncio.run(train())
    assert first[1] == pytest.approx(1.0, abs=0.05)
    assert second[1] == pytest.approx(0.0, abs=0.05)
    assert first[0] == pytest.approx(0.5, abs=0.1)  # not trained: outside of the mask
    good = [sample("abc", 1.0, 0.9), sample("xyz", 0.0, 0.1)]
    assert value_metrics(good)["critic/explained_variance"] == pytest.approx(1 - 0.01 / 0.25)
    assert value_metrics(rows[:1])["critic/explained_variance"] == 0.0


class RecordingAdapter(ScriptedAuxiliaryAdapter):
    """Counts requests for logprobs and records the weights of each update."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.logprob_requests, self.weights = 0, []

    async def logprobs(self, rows, ids):
        self.logprob_requests += 1
        return await super().logprobs(rows, ids)

    async def fit(self, rows, ids, weights, optimizer, learning_rate):
        self.weights += weights
        return await super().fit(rows, ids, weights, optimizer, learning_rate)


def test_loss_weights_sum_to_zero_over_the_bins(tmp_path):
    adapter = RecordingAdapter(tmp_path)
    critic = Critic(CriticConfig(bins=4, low=0.0, high=3.0), adapter, 1)
    asyncio.run(critic.learn(1, [sample("abc", 2.0)]))
    (weights,) = adapter.weights
    assert weights.sum(axis=1).tolist() == pytest.approx([0.0, 0.0], abs=1e-7)
    assert weights[0].tolist() == [0.0] * 4  # outside of the mask
    assert weights[1].tolist() == pytest.approx(critic._bins.targets(np.array([2.0]))[0] - 0.25, abs=1e-7)


def test_critic_reuses_logprobs_of_the_same_weights(tmp_path):
    adapter = RecordingAdapter(tmp_path)
    critic = Critic(CriticConfig(epochs=2), adapter, 1)
    rows = [sample("abc", 1.0)]

    async def step():
        await critic.values(rows)
        return await critic.learn(1, rows)

    first = asyncio.run(step())["critic/loss"]
    assert adapter.logprob_requests == 2  # for the values, and again before the second update
    assert asyncio.run(step())["critic/loss"] < first


def test_clip_bounds_returns_around_old_values(tmp_path):
    critic = Critic(CriticConfig(clip=0.25), ScriptedAuxiliaryAdapter(tmp_path), 1)
    assert critic._clipped_returns(sample("ab", 1.0, 0.5)).tolist() == [0.75]


def ppo(**more):
    """Settings of a PPO run with a critic."""
    critic = {"bins": 16, "optimizer": {"learning_rate": 20.0}, **more.pop("critic", {})}
    algorithm = {"type": "ppo", "kl": {"type": "none", "coef": 0.0}, "critic": critic}
    return {"algorithm": algorithm, "group_size": 1, "groups_per_step": 8, **more}


def test_run_with_critic_learns_at_group_size_1(tmp_path):
    state = run(settings(tmp_path / "run", **ppo(steps=30, optimizer={"learning_rate": 0.5})))
    numbers = metric_rows(tmp_path / "run")
    assert state.critic_path
    trained = [row for row in numbers if "critic/explained_variance" in row]
    assert len(trained) == 30
    assert trained[-1]["reward/mean"] > trained[0]["reward/mean"]
    assert np.mean([row["reward/mean"] for row in trained[-5:]]) > 0.8


def test_warmup_steps_skip_policy_updates(tmp_path):
    run(settings(tmp_path / "run", **ppo(steps=4, critic={"warmup_steps": 3})))
    trained = [row for row in metric_rows(tmp_path / "run") if "critic/loss" in row]
    assert [row.get("optim/skipped", 0.0) for row in trained] == [1.0, 1.0, 1.0, 0.0]


def test_interrupted_run_resumes_with_its_critic(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(settings(whole, **ppo(steps=6, checkpoint={"every": 3})))
    run(settings(broken, **ppo(steps=3, checkpoint={"every": 3})))
    run(settings(broken, **ppo(steps=6, checkpoint={"every": 3})))
    after = [
        [row for row in metric_rows(folder) if row["step"] > 3 and "critic/loss" in row] for folder in (whole, broken)
    ]
    assert after[0] == after[1]


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        ({"type": "ppo", "critic": None}, "needs a critic"),
        ({"type": "grpo", "critic": {}}, "needs no critic"),
        ({"type": "ppo", "critic": {"low": 1.0, "high": 1.0}}, "set it above low"),
    ],
)
def test_rejects_critics_that_do_not_fit_the_algorithm(tmp_path, algorithm, sentence):
    with pytest.raises(ValueError, match=sentence):
        settings(tmp_path, algorithm=algorithm)
