"""Losses have the same gradient on the server and on the client, and `loss_location` names the place."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch

from tests.rl.algorithms.helpers import columns, run
from tinsmith.engine.training import loss_specs, losses
from tinsmith.errors import ConfigError
from tinsmith.rl.algorithms import loss_dispatch
from tinsmith.rl.algorithms.algorithm import Algorithm
from tinsmith.rl.algorithms.config import DATA_ONLY, NAMES, PAIRS, AlgorithmConfig
from tinsmith.rl.algorithms.losses import LossConfig
from tinsmith.rl.policy.trainer import UpdateResult
from tinsmith.rl.policy.training_rows import TrainingRow, rows_from_trajectory
from tinsmith.rl.types import Group, Rollout, Task, Turn

OURS = frozenset(name for names in loss_specs.EXTENSIONS.values() for name in names)


def rollout(seed: int, reward: float) -> Rollout:
    """A rollout of one turn with random tokens and logprobs."""
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
    return Rollout.single((turn,), reward)


def groups(size: int = 4) -> list[Group]:
    """Three groups of `size` rollouts with random rewards."""
    rewards = np.random.default_rng(5).uniform(0, 1, (3, size))
    return [
        Group(
            task=Task(id=str(p), messages=()),
            rollouts=tuple(rollout(10 * p + g, float(rewards[p, g])) for g in range(size)),
        )
        for p in range(3)
    ]


def config(name: str, **more) -> AlgorithmConfig:
    teacher = {"teacher": "large"} if name in ("jsd", "on_policy_distill", "topk_distill") else {}
    return AlgorithmConfig.model_validate({"type": name, **teacher, **more})


def logprobs_near(rows: tuple[TrainingRow, ...]) -> list[torch.Tensor]:
    """Leaf logprobs close to those of the sampler."""
    random = np.random.default_rng(1)
    return [
        torch.tensor(np.where(row.mask, row.logprobs + random.normal(0, 0.4, len(row.mask)), -1.0), requires_grad=True)
        for row in rows
    ]


def grads(update, logprobs) -> list[torch.Tensor]:
    """d loss / d logprob, by the client or by the formulas of the engine."""
    if update.client is not None:
        loss, _ = update.client(logprobs)
        return list(torch.autograd.grad(loss, logprobs))
    spec = loss_specs.LOSSES[update.loss]
    flat = torch.cat(logprobs)
    inputs = {
        name: torch.cat(
            [torch.as_tensor(np.asarray(inputs_of_row[name], np.float64)) for inputs_of_row in update.inputs]
        )
        for name in update.inputs[0]
    }
    sequence = torch.repeat_interleave(torch.arange(len(logprobs)), torch.tensor([len(row) for row in logprobs]))
    numbers = {**{key: value for key, value in spec.numeric_settings.items() if value is not None}, **update.config}
    estimator = str(numbers.pop("kl_estimator", "k2"))
    targets = losses.LossInputs(logprobs=flat, entropies=None, sequence=sequence, inputs=inputs)
    loss, _ = losses.objective(update.loss, targets, numbers, estimator, update.config)
    return list(torch.autograd.grad(loss, logprobs))


SERVED = ["grpo", "grpo_std", "dapo", "reinforceplusplus", "rloo", "opmd", "asymre", "cispo", "gspo", "raft", "sft"]


@pytest.mark.parametrize("aggregate", ["token_sum", "token_mean", "seq_mean_token_sum", "seq_mean_token_mean"])
@pytest.mark.parametrize("name", SERVED)
def test_server_loss_has_the_gradient_of_the_client_loss(name, aggregate):
    kl = {} if name in ("opmd", "sft", "raft") else {"kl": {"type": "k3", "coef": 0.2}}
    algorithm = config(name, aggregate=aggregate, **kl)
    update = run(Algorithm(algorithm, OURS, columns(), 0).score_part(3, groups()))
    assert update.loss, f"{name} should be computed by the server"
    batch = loss_dispatch.tokens_of_rows(update.rows, algorithm, 3)
    client_update = loss_dispatch.update_by_client(
        update.rows, batch, algorithm, loss_dispatch.LossContext(step=3, kl_coef=algorithm.kl.coef)
    )
    logprobs = logprobs_near(update.rows)
    for server_grad, client_grad, row in zip(
        grads(update, logprobs), grads(client_update, logprobs), update.rows, strict=True
    ):
        inside = torch.from_numpy(row.mask)
        torch.testing.assert_close(server_grad[inside], client_grad[inside], rtol=1e-5, atol=1e-7)
        assert not server_grad[~inside].any()
    _, by_client = client_update.client(logprobs)
    measured = update.measure([leaf.detach().numpy() for leaf in logprobs])
    assert measured == pytest.approx({key: value for key, value in by_client.items() if key in measured}, rel=1e-5)
    assert ("clip_fraction" in measured) == ("clip_fraction" in by_client)


def test_clip_fraction_of_a_server_loss_counts_clipped_tokens():
    algorithm = config("grpo", loss={"type": "ppo", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": None})
    update = run(Algorithm(algorithm, OURS, columns(), 0).score_part(3, groups()))
    assert update.loss == "ppo"
    logprobs = [leaf.detach().numpy() for leaf in logprobs_near(update.rows)]
    clipped = total = 0.0
    for row, p in zip(update.rows, logprobs, strict=True):
        for at in np.flatnonzero(row.mask):
            ratio, advantage = math.exp(p[at] - row.logprobs[at]), row.advantages[at]
            clipped += row.count * ((advantage > 0 and ratio > 1.3) or (advantage < 0 and ratio < 0.9))
            total += row.count
    assert 0 < clipped < total
    assert update.measure(logprobs)["clip_fraction"] == pytest.approx(clipped / total)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*PAIRS, "ppo")])
def test_every_algorithm_makes_a_differentiable_update(name):
    apart = {} if name in DATA_ONLY else {"merge_replies": False}
    algorithm = Algorithm(config(name, **apart), frozenset(), columns(), 0)
    update = run(algorithm.score_part(1, groups()))
    assert update.rows
    logprobs = logprobs_near(update.rows)
    if update.more_targets:
        logprobs = [row[:, None].repeat(1, 3).detach().requires_grad_() for row in logprobs]
    for grad in grads(update, logprobs):
        assert torch.isfinite(grad).all()
    assert ("server" in algorithm.loss_location) == bool(update.loss)


def test_extensions_move_loss_terms_to_the_server():
    for more, on_server in (
        ({"kl": {"type": "k2", "coef": 0.1}}, True),
        ({"entropy": {"coef": 0.1}}, True),
        ({"kl": {"type": "abs", "coef": 0.1}}, False),
        ({}, True),
    ):
        algorithm = config("grpo", **more)
        assert (loss_dispatch.server_loss(algorithm, OURS) is not None) is on_server
        assert (loss_dispatch.server_loss(algorithm, frozenset()) is not None) is (not more)


def test_masks_of_loss_terms_are_aggregate_weights():
    algorithm = config("grpo_std", aggregate="token_mean", entropy={"coef": 0.5}, loss={"dual_clip": None})
    update = run(Algorithm(algorithm, OURS, columns(), 0).score_part(1, groups()))
    spoken = sum(int(row.mask.sum()) * row.count for row in update.rows)
    for inputs, row in zip(update.inputs, update.rows, strict=True):
        expected = np.where(row.mask, row.count / spoken, 0.0)
        np.testing.assert_allclose(inputs["entropy_mask"], expected, rtol=1e-6)
        np.testing.assert_allclose(inputs["kl_mask"], expected, rtol=1e-6)
    assert update.config["entropy_coef"] == 0.5


def test_demonstrations_may_have_an_aggregate_of_their_own():
    rows = [row for rollout in groups()[0].rollouts for row in rows_from_trajectory(rollout.trajectories[0])]
    rows[0] = replace(rows[0], kind="expert")
    settings = config("mix", loss={"expert_aggregate": "token_sum"}, kl={"type": "none", "coef": 0})
    batch = loss_dispatch.tokens_of_rows(rows, settings, 1)
    policy = sum(int(row.mask.sum()) for row in rows[1:])
    assert batch.policy_weights.tolist() == pytest.approx([0.0 if own else 1 / policy for own in batch.expert])
    assert batch.expert_weights.tolist() == [1.0 if own else 0.0 for own in batch.expert]


def test_means_include_replies_without_advantage():
    level = Group(task=Task(id="l", messages=()), rollouts=(rollout(90, 1.0), rollout(91, 1.0)))
    algorithm = config("dapo", loss={"dual_clip": None}, merge_replies=False)
    alone = run(Algorithm(algorithm, OURS, columns(), 0).score_part(1, groups()))
    beside = run(Algorithm(algorithm, OURS, columns(), 0).score_part(1, [*groups(), level]))
    assert len(alone.rows) == len(beside.rows)
    tokens = sum(int(row.mask.sum()) for row in alone.rows)
    more = sum(len(rollout.turns[0].tokens) for rollout in level.rollouts)
    for a, b in zip(alone.inputs, beside.inputs, strict=True):
        np.testing.assert_allclose(b["advantages"], a["advantages"] * tokens / (tokens + more), rtol=1e-5)


def test_adaptive_kl_coefficient_is_part_of_the_state():
    settings = config("grpo", kl={"type": "k2", "coef": 0.1, "target": 0.01, "horizon": 10.0})
    algorithm = Algorithm(settings, OURS, columns(), 0)
    update = run(algorithm.score_part(1, groups()))
    weight = sum(float(inputs["kl_mask"].sum()) for inputs in update.inputs)
    result = UpdateResult(logprobs=(), metrics={"kl:sum": 1.0 * weight})
    numbers = algorithm.adapt_coefficients([(update, result)], update.rows, update.numbers)
    assert numbers["optim/kl"] == pytest.approx(1.0)
    assert numbers["optim/kl_coef"] > 0.1
    other = Algorithm(settings, OURS, columns(), 0)
    other.restore(algorithm.state)
    assert run(other.score_part(2, groups())).config["kl_coef"] == numbers["optim/kl_coef"]


def test_kl_penalty_is_reported_as_reward_kl():
    algorithm = config("reinforceplusplus", kl={"type": "none"}, kl_penalty={"type": "k1", "coef": 0.5})
    update = run(Algorithm(algorithm, OURS, columns(shift=-0.25), 0).score_part(1, groups()))
    assert update.numbers["reward/kl"] == pytest.approx(0.25)


def test_equal_replies_are_merged_only_for_linear_losses():
    twice = Group(task=Task(id="t", messages=()), rollouts=(rollout(1, 1.0), rollout(1, 1.0), rollout(2, 0.0)))
    for name, count in (("grpo", 2), ("rec", 3), ("on_policy_distill", 3)):
        update = run(Algorithm(config(name), OURS, columns(), 0).score_part(1, [twice]))
        assert len(update.rows) == count, name
    update = run(Algorithm(config("grpo", merge_replies=False), OURS, columns(), 0).score_part(1, [twice]))
    assert len(update.rows) == 3


def spoken(tokens: tuple[int, ...], old: float, reward: float) -> Rollout:
    """A rollout of one turn with logprob `old` for every token."""
    turn = Turn(prompt=(1, 2), tokens=tokens, logprobs=(old,) * len(tokens), text="", stop="stop", state="s")
    return Rollout.single((turn,), reward)


def by_sequence(loss: dict, ratio: float, merge: bool) -> dict[tuple[int, ...], float]:
    """Gradient sums by reply, duplicates added up, for a policy whose probabilities changed by `ratio`."""
    said = [((5, 6), 1.0), ((5, 6), 0.0), ((5, 6), 0.7), ((7,), 0.4), ((5, 6), 0.2), ((5, 6), 0.55), ((7,), 0.45)]
    rollouts = tuple(spoken(tokens, -1.0, reward) for tokens, reward in said)
    algorithm = config("rloo", loss=loss, kl={"type": "k2", "coef": 0.1}, merge_replies=merge)
    group = Group(task=Task(id="t", messages=()), rollouts=rollouts)
    update = run(Algorithm(algorithm, OURS, columns(), 0).score_part(1, [group]))
    logprobs = [torch.tensor(np.where(row.mask, np.log(ratio) - 1.0, 0.0), requires_grad=True) for row in update.rows]
    gradients: dict[tuple[int, ...], float] = {}
    for row, grad in zip(update.rows, grads(update, logprobs), strict=True):
        key = tuple(row.sequence)
        gradients[key] = gradients.get(key, 0.0) + float(grad[torch.from_numpy(row.mask)].sum())
    return gradients


NAMES = [kind.model_fields["type"].default for kind in get_args(get_args(LossConfig)[0])]
LOSSES = [name for name in NAMES if name not in (*PAIRS, "custom")]
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
@pytest.mark.parametrize("loss", [{"type": name} for name in LOSSES if name != "topk_distill"] + VARIANTS, ids=str)
def test_merged_replies_have_the_gradient_of_separate_rows(loss, ratio):
    shared, apart = by_sequence(loss, ratio, merge=True), by_sequence(loss, ratio, merge=False)
    assert shared == pytest.approx(apart, rel=1e-5, abs=1e-7)


def test_piecewise_losses_merge_rows_of_equal_sign():
    rewards = (1.0, 0.9, 0.0, 0.1)
    group = Group(task=Task(id="t", messages=()), rollouts=tuple(spoken((5,), -1.0, reward) for reward in rewards))
    for name, counts in (("grpo", [4]), ("dapo", [2, 2]), ("gspo", [2, 2]), ("sapo", [2, 2])):
        algorithm = config(name, advantage={"type": "rloo"}, kl={"type": "k2", "coef": 0.1})
        assert [
            row.count for row in run(Algorithm(algorithm, OURS, columns(), 0).score_part(1, [group])).rows
        ] == counts, name


def test_equal_replies_with_other_logprobs_are_not_merged():
    said = ((-1.0, 1.0), (-1.2, 1.0), (-1.0, 1.0))
    rollouts = (*(spoken((5,), old, reward) for old, reward in said), spoken((6,), -1.0, 0.0))
    group = Group(task=Task(id="t", messages=()), rollouts=rollouts)
    update = run(Algorithm(config("grpo"), OURS, columns(), 0).score_part(1, [group]))
    assert [row.count for row in update.rows] == [2, 1, 1]


def test_refill_replaces_dropped_groups():
    level = Group(task=Task(id="l", messages=()), rollouts=(rollout(90, 1.0), rollout(91, 1.0)))
    update = run(Algorithm(config("grpo", refill=True), OURS, columns(), 0).score_part(1, [*groups(), level]))
    assert sum(row.count for row in update.rows) == 3 * 4 + 2


@pytest.mark.parametrize(("regularizer", "expected"), [("forward_kl", -0.5 / 3), ("k2", 0.5 * 0.2 / 3)])
def test_rec_regularizes_replies_of_zero_advantage(regularizer, expected):
    """By hand: mean over 3 tokens of coef (q - p), or of coef (p - q)^2 / 2, with p - q = 0.2 and coef = 0.5."""
    loss = {"regularizer": regularizer, "regularizer_coef": 0.5}
    algorithm = config("rec", loss=loss, kl={"type": "none"}, aggregate="token_mean", merge_replies=False)
    group = Group(task=Task(id="t", messages=()), rollouts=(spoken((5, 6), -1.0, 1.0), spoken((7,), -1.0, 1.0)))
    update = run(Algorithm(algorithm, OURS, columns(), 0).score_part(1, [group]))
    assert not any(row.advantages.any() for row in update.rows)
    logprobs = [torch.tensor(row.logprobs + 0.2, dtype=torch.float64, requires_grad=True) for row in update.rows]
    on_tokens = [grad[row.mask] for grad, row in zip(grads(update, logprobs), update.rows, strict=True)]
    torch.testing.assert_close(torch.cat(on_tokens), torch.full((3,), expected, dtype=torch.float64))


def test_missing_column_source_is_an_error_before_the_run():
    with pytest.raises(ConfigError, match="reads teacher"):
        Algorithm(config("jsd"), OURS, {}, 0)


def test_settings_override_the_preset():
    algorithm = config("grpo_std", loss={"clip_high": 0.4}, advantage={"type": "rloo"})
    assert (algorithm.loss.clip_high, algorithm.loss.clip_low, algorithm.advantage.type) == (0.4, 0.2, "rloo")
    with pytest.raises(ValueError, match="kl_penalty is not used with advantage jsd"):
        config("jsd", kl_penalty={"type": "k1", "coef": 0.1})
