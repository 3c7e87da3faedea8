"""Whoever computes a loss, its gradient is the same; and who does is told."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch

from tests.rl.algorithms.helpers import columns, run
from tinsmith.engine.training import loss_specs, losses
from tinsmith.errors import ConfigError
from tinsmith.rl.algorithms import Algorithm, AlgorithmConfig, loss_dispatch
from tinsmith.rl.algorithms.config import DATA_ONLY, NAMES
from tinsmith.rl.algorithms.losses import LossConfig
from tinsmith.rl.policy.base import UpdateResult
from tinsmith.rl.policy.training_rows import TrainingRow
from tinsmith.rl.types import Group, Rollout, Task, Turn

OURS = frozenset(name for names in loss_specs.EXTENSIONS.values() for name in names)


def rollout(seed: int, reward: float) -> Rollout:
    random = np.random.default_rng(seed)
    length = int(random.integers(1, 6))
    turn = Turn(
        prompt=(1, 2),
        tokens=tuple(int(token) for token in random.integers(3, 90, length)),
        logprobs=tuple(-random.uniform(0.1, 3.0, length)),
        text="",
        stop="stop",
        state="s",
    )
    return Rollout(turns=(turn,), rewards={"policy": reward})


def groups(size: int = 4) -> list[Group]:
    rewards = np.random.default_rng(5).uniform(0, 1, (3, size))
    return [
        Group(
            task=Task(id=str(p), messages=()),
            rollouts=tuple(rollout(10 * p + g, float(rewards[p, g])) for g in range(size)),
        )
        for p in range(3)
    ]


def config(name: str, **more) -> AlgorithmConfig:
    teacher = {"teacher": "large"} if name in ("jsd", "on_policy_distill") else {}
    return AlgorithmConfig.model_validate({"type": name, **teacher, **more})


def logprobs_near(rows: tuple[TrainingRow, ...]) -> list[torch.Tensor]:
    random = np.random.default_rng(1)
    return [
        torch.tensor(np.where(row.mask, row.logprobs + random.normal(0, 0.4, len(row.mask)), -1.0), requires_grad=True)
        for row in rows
    ]


def slopes(update, logprobs) -> list[torch.Tensor]:
    """d loss / d logprob, by the client or by the formulas of the engine."""
    if update.client is not None:
        loss, _ = update.client(logprobs)
        return list(torch.autograd.grad(loss, logprobs))
    spec = loss_specs.LOSSES[update.loss]
    flat = torch.cat(logprobs)
    inputs = {
        name: torch.cat([torch.as_tensor(np.asarray(one[name], np.float64)) for one in update.inputs])
        for name in update.inputs[0]
    }
    sequence = torch.repeat_interleave(torch.arange(len(logprobs)), torch.tensor([len(one) for one in logprobs]))
    numbers = {**{key: value for key, value in spec.numeric_settings.items() if value is not None}, **update.config}
    estimator = str(numbers.pop("kl_estimator", "k2"))
    targets = losses.LossInputs(logprobs=flat, entropies=None, sequence=sequence, inputs=inputs)
    loss, _ = losses.objective(update.loss, targets, numbers, estimator, update.config)
    return list(torch.autograd.grad(loss, logprobs))


SERVED = ["grpo", "grpo_std", "dapo", "reinforceplusplus", "rloo", "opmd", "asymre", "cispo", "gspo", "raft", "sft"]


@pytest.mark.parametrize("aggregate", ["token_sum", "token_mean", "seq_mean_token_sum", "seq_mean_token_mean"])
@pytest.mark.parametrize("name", SERVED)
def test_the_servers_loss_has_the_gradient_of_the_clients(name, aggregate):
    kl = {} if name in ("opmd", "sft", "raft") else {"kl": {"type": "k3", "coef": 0.2}}
    one = config(name, aggregate=aggregate, **kl)
    update = run(Algorithm(one, OURS, columns(), 0).score(3, groups()))
    assert update.loss, f"{name} should be computed by the server"
    batch = loss_dispatch.tokens_of_rows(update.rows, one, 3)
    here = loss_dispatch.update_by_client(
        update.rows, batch, one, loss_dispatch.LossContext(step=3, kl_coef=one.kl.coef)
    )
    logprobs = logprobs_near(update.rows)
    for there, mine, row in zip(slopes(update, logprobs), slopes(here, logprobs), update.rows, strict=True):
        inside = torch.from_numpy(row.mask)
        torch.testing.assert_close(there[inside], mine[inside], rtol=1e-5, atol=1e-7)
        assert not there[~inside].any()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("dpo", "ppo")])
def test_every_algorithm_ends_in_an_update_that_can_be_differentiated(name):
    apart = {} if name in DATA_ONLY else {"merge_replies": False}
    algorithm = Algorithm(config(name, **apart), frozenset(), columns(), 0)
    update = run(algorithm.score(1, groups()))
    assert update.rows
    logprobs = logprobs_near(update.rows)
    for slope in slopes(update, logprobs):
        assert torch.isfinite(slope).all()
    assert ("server" in algorithm.loss_location) == bool(update.loss)


def test_without_extensions_terms_are_computed_here_and_with_them_there():
    for more, there in (
        ({"kl": {"type": "k2", "coef": 0.1}}, True),
        ({"entropy": {"coef": 0.1}}, True),
        ({"kl": {"type": "abs", "coef": 0.1}}, False),
        ({}, True),
    ):
        one = config("grpo", **more)
        assert (loss_dispatch.server_loss(one, OURS) is not None) is there
        assert (loss_dispatch.server_loss(one, frozenset()) is not None) is (not more)


def test_masks_of_terms_are_the_weights_of_the_aggregate():
    one = config("grpo_std", aggregate="token_mean", entropy={"coef": 0.5}, loss={"dual_clip": None})
    update = run(Algorithm(one, OURS, columns(), 0).score(1, groups()))
    spoken = sum(int(row.mask.sum()) * row.count for row in update.rows)
    for inputs, row in zip(update.inputs, update.rows, strict=True):
        expected = np.where(row.mask, row.count / spoken, 0.0)
        np.testing.assert_allclose(inputs["entropy_mask"], expected, rtol=1e-6)
        np.testing.assert_allclose(inputs["kl_mask"], expected, rtol=1e-6)
    assert update.config["entropy_coef"] == 0.5


def test_means_are_over_all_replies_also_those_that_teach_nothing():
    level = Group(task=Task(id="l", messages=()), rollouts=(rollout(90, 1.0), rollout(91, 1.0)))
    one = config("dapo", loss={"dual_clip": None}, merge_replies=False)
    alone = run(Algorithm(one, OURS, columns(), 0).score(1, groups()))
    beside = run(Algorithm(one, OURS, columns(), 0).score(1, [*groups(), level]))
    assert len(alone.rows) == len(beside.rows)
    tokens = sum(int(row.mask.sum()) for row in alone.rows)
    more = sum(len(one.turns[0].tokens) for one in level.rollouts)
    for a, b in zip(alone.inputs, beside.inputs, strict=True):
        np.testing.assert_allclose(b["advantages"], a["advantages"] * tokens / (tokens + more), rtol=1e-5)


def test_the_coefficient_that_adapts_is_remembered():
    one = config("grpo", kl={"type": "k2", "coef": 0.1, "target": 0.01, "horizon": 10.0})
    algorithm = Algorithm(one, OURS, columns(), 0)
    update = run(algorithm.score(1, groups()))
    weight = sum(float(inputs["kl_mask"].sum()) for inputs in update.inputs)
    numbers = algorithm.adapt_coefficients(update, UpdateResult(logprobs=(), metrics={"kl:sum": 1.0 * weight}))
    assert numbers["optim/kl"] == pytest.approx(1.0)
    assert numbers["optim/kl_coef"] > 0.1
    other = Algorithm(one, OURS, columns(), 0)
    other.restore(algorithm.state)
    assert run(other.score(2, groups())).config["kl_coef"] == numbers["optim/kl_coef"]


def test_a_penalty_is_taken_off_the_reward():
    one = config("reinforceplusplus", kl={"type": "none"}, kl_penalty={"type": "k1", "coef": 0.5})
    update = run(Algorithm(one, OURS, columns(shift=-0.25), 0).score(1, groups()))
    assert update.numbers["reward/kl"] == pytest.approx(0.25)


def test_equal_replies_share_a_row_only_where_the_loss_is_linear():
    twice = Group(task=Task(id="t", messages=()), rollouts=(rollout(1, 1.0), rollout(1, 1.0), rollout(2, 0.0)))
    for name, count in (("grpo", 2), ("rec", 3), ("on_policy_distill", 3)):
        update = run(Algorithm(config(name), OURS, columns(), 0).score(1, [twice]))
        assert len(update.rows) == count, name
    update = run(Algorithm(config("grpo", merge_replies=False), OURS, columns(), 0).score(1, [twice]))
    assert len(update.rows) == 3


def spoken(tokens: tuple[int, ...], old: float, reward: float) -> Rollout:
    turn = Turn(prompt=(1, 2), tokens=tokens, logprobs=(old,) * len(tokens), text="", stop="stop", state="s")
    return Rollout(turns=(turn,), rewards={"policy": reward})


def by_sequence(loss: dict, ratio: float, merge: bool) -> dict[tuple[int, ...], float]:
    """The slopes of each reply that was said, copies together, where the policy has moved by `ratio` since then."""
    said = [((5, 6), 1.0), ((5, 6), 0.0), ((5, 6), 0.7), ((7,), 0.4), ((5, 6), 0.2), ((5, 6), 0.55), ((7,), 0.45)]
    rollouts = tuple(spoken(tokens, -1.0, reward) for tokens, reward in said)
    one = config("rloo", loss=loss, kl={"type": "k2", "coef": 0.1}, merge_replies=merge)
    group = Group(task=Task(id="t", messages=()), rollouts=rollouts)
    update = run(Algorithm(one, OURS, columns(), 0).score(1, [group]))
    logprobs = [torch.tensor(np.where(row.mask, np.log(ratio) - 1.0, 0.0), requires_grad=True) for row in update.rows]
    found: dict[tuple[int, ...], float] = {}
    for row, slope in zip(update.rows, slopes(update, logprobs), strict=True):
        key = tuple(row.sequence)
        found[key] = found.get(key, 0.0) + float(slope[torch.from_numpy(row.mask)].sum())
    return found


LOSSES = [kind.model_fields["type"].default for kind in get_args(get_args(LossConfig)[0])]
VARIANTS = [
    {"type": "ppo", "dual_clip": None},
    {"type": "ppo", "mask_drift": 0.1},
    {"type": "ppo", "on_policy": True},
    {"type": "cispo", "mask": True, "clip_low": 0.2},
    {"type": "sapo", "score_function": True},
    {"type": "topr", "threshold": 0.3},
    {"type": "topr", "threshold": -0.3},
    {"type": "rec", "clip": "ring", "weight": "advantage"},
]


@pytest.mark.parametrize("ratio", [0.5, 0.75, 1.35, 3.5])
@pytest.mark.parametrize("loss", [{"type": name} for name in LOSSES if name != "dpo"] + VARIANTS, ids=str)
def test_equal_replies_that_share_a_row_have_the_gradient_of_each_by_itself(loss, ratio):
    shared, apart = by_sequence(loss, ratio, merge=True), by_sequence(loss, ratio, merge=False)
    assert shared == pytest.approx(apart, rel=1e-5, abs=1e-7)


def test_losses_that_bend_share_rows_of_one_sign():
    rewards = (1.0, 0.9, 0.0, 0.1)
    group = Group(task=Task(id="t", messages=()), rollouts=tuple(spoken((5,), -1.0, one) for one in rewards))
    for name, counts in (("grpo", [4]), ("dapo", [2, 2]), ("gspo", [2, 2]), ("sapo", [2, 2])):
        one = config(name, advantage={"type": "rloo"}, kl={"type": "k2", "coef": 0.1})
        assert [row.count for row in run(Algorithm(one, OURS, columns(), 0).score(1, [group])).rows] == counts, name


def test_equal_replies_of_two_versions_stay_apart():
    said = ((-1.0, 1.0), (-1.2, 1.0), (-1.0, 1.0))
    rollouts = (*(spoken((5,), old, reward) for old, reward in said), spoken((6,), -1.0, 0.0))
    group = Group(task=Task(id="t", messages=()), rollouts=rollouts)
    update = run(Algorithm(config("grpo"), OURS, columns(), 0).score(1, [group]))
    assert [row.count for row in update.rows] == [2, 1, 1]


def test_what_was_dropped_can_be_refilled():
    level = Group(task=Task(id="l", messages=()), rollouts=(rollout(90, 1.0), rollout(91, 1.0)))
    update = run(Algorithm(config("grpo", refill=True), OURS, columns(), 0).score(1, [*groups(), level]))
    assert sum(row.count for row in update.rows) == 3 * 4 + 2


def test_what_nobody_gives_is_missed_before_the_run():
    with pytest.raises(ConfigError, match="reads teacher"):
        Algorithm(config("jsd"), OURS, {}, 0)


def test_parts_lie_on_top_of_presets():
    one = config("grpo_std", loss={"clip_high": 0.4}, advantage={"type": "rloo"})
    assert (one.loss.clip_high, one.loss.clip_low, one.advantage.type) == (0.4, 0.2, "rloo")
    with pytest.raises(ValueError, match="kl_penalty does nothing"):
        config("jsd", kl_penalty={"type": "k1", "coef": 0.1})
