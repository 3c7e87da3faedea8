"""Weights after each optimizer step of a batch equal an independent float64 reference with torch's AdamW.

The policy is a table of logits for the next token. The reference is written from the definitions, over rollouts: it
shares no code with rows, weights, losses or divisions of the harness.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.rl.algorithms.helpers import run
from tests.rl.algorithms.test_loss_dispatch import OURS, config, grads, groups
from tinsmith.rl.algorithms.algorithm import Algorithm
from tinsmith.rl.algorithms.updates import UpdatesConfig
from tinsmith.rl.optimizer import OptimizerConfig
from tinsmith.rl.policy.trainer import Update
from tinsmith.rl.policy.training_rows import TrainingRow
from tinsmith.rl.types import Group, Turn

VOCABULARY = 96
ADAM = OptimizerConfig(eps=1e-4, weight_decay=0.1)
RATE = 0.05


class Table:
    """Logits [V, V] of the next token after each token, trained by AdamW."""

    def __init__(self) -> None:
        start = torch.randn(VOCABULARY, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        self.logits = start.requires_grad_()
        betas = (ADAM.beta1, ADAM.beta2)
        self._adam = torch.optim.AdamW([self.logits], RATE, betas, ADAM.eps, ADAM.weight_decay)

    def logprobs(self, tokens: Sequence[int], targets: Sequence[int]) -> Tensor:
        """Logprobs of the targets, [N]."""
        return torch.log_softmax(self.logits[list(tokens)], -1)[range(len(targets)), list(targets)]

    def step(self) -> Tensor:
        """Take an optimizer step; returns the weights after it."""
        self._adam.step()
        self._adam.zero_grad()
        return self.logits.detach().clone()


def trained_by_updates(updates: Sequence[Update], table: Table) -> list[Tensor]:
    """Weights after each update, whose loss is the server's formula or the client's."""
    weights = []
    for update in updates:
        leaves = [table.logprobs(row.tokens, row.targets) for row in update.rows]
        cut = [leaf.detach().requires_grad_() for leaf in leaves]
        torch.autograd.backward(leaves, grads(update, cut))
        weights.append(table.step())
    return weights


@dataclass
class Reference:
    """Loss of a minibatch: the mean over its tokens of mask x weight x PPO's loss of the ratio exp(p - old)."""

    anchored: bool = False
    cap: float = math.inf
    weighted: bool = False
    token_mask: tuple[float, float] | None = None
    geometric_mask: tuple[float, float] | None = None
    low: float = 0.8
    high: float = 1.2

    def trained(self, table: Table, batch: Sequence[Group], minibatches: int, epochs: int) -> list[Tensor]:
        """Weights after each optimizer step, with consecutive minibatches of equally many groups."""
        size = len(batch) // minibatches
        anchors = {id(turn): self._logprobs(table, turn).detach() for turn, _ in self._replies(batch)}
        weights = []
        for _ in range(epochs):
            for first in range(0, len(batch), size):
                replies = self._replies(batch[first : first + size])
                losses = [self._loss(table, turn, advantage, anchors[id(turn)]) for turn, advantage in replies]
                (sum(losses) / sum(len(turn.tokens) for turn, _ in replies)).backward()  # type: ignore[union-attr]
                weights.append(table.step())
        return weights

    @staticmethod
    def _replies(batch: Sequence[Group]) -> list[tuple[Turn, float]]:
        result = []
        for group in batch:
            rewards = np.array(group.rewards)
            for rollout, advantage in zip(group.rollouts, rewards - rewards.mean(), strict=True):
                result.append((rollout.trajectories[0].turns[0], float(advantage)))
        return result

    @staticmethod
    def _logprobs(table: Table, turn: Turn) -> Tensor:
        sequence = [*turn.prompt, *turn.tokens]
        return table.logprobs(sequence[:-1], sequence[1:])[-len(turn.tokens) :]

    def _loss(self, table: Table, turn: Turn, advantage: float, anchor: Tensor) -> Tensor:
        p_T, q_T = self._logprobs(table, turn), torch.tensor(turn.logprobs, dtype=torch.float64)
        compared_T = anchor if self.anchored else p_T.detach()
        mean = float((compared_T - q_T).mean())
        total = torch.zeros((), dtype=torch.float64)
        for p, q, compared in zip(p_T, q_T, compared_T, strict=True):
            ratio = (p - (compared if self.anchored else q)).exp()
            loss = -torch.minimum(advantage * ratio, advantage * ratio.clamp(self.low, self.high))
            to_sampler = math.exp(float(compared - q))
            if self.weighted:
                loss = loss * min(to_sampler, self.cap)
            if self.token_mask is not None:
                low, high = self.token_mask
                loss = loss * (
                    0 if (advantage > 0 and to_sampler > high) or (advantage < 0 and to_sampler < low) else 1
                )
            if self.geometric_mask is not None:
                loss = loss * (self.geometric_mask[0] <= math.exp(mean) <= self.geometric_mask[1])
            total = total + loss
        return total


PPO = {"type": "ppo", "dual_clip": None}
CASES = {
    "behaviour logprobs": (PPO, {}, Reference()),
    "verl's old logprobs": (PPO, {"type": "proximal"}, Reference(anchored=True)),
    "decoupled, truncated": (PPO, {"type": "tis", "cap": 1.5}, Reference(anchored=True, weighted=True, cap=1.5)),
    "token mask": (
        {"type": "importance_sampling"},
        {"mask": "token", "mask_low": 0.6, "mask_high": 1.8},
        Reference(token_mask=(0.6, 1.8), low=0.0, high=math.inf),
    ),
    "geometric mask": (
        PPO,
        {"mask": "geometric", "mask_low": 0.3, "mask_high": 2.5},
        Reference(geometric_mask=(0.3, 2.5)),
    ),
    "all": (
        PPO,
        {"type": "tis", "mask": "token"},
        Reference(anchored=True, weighted=True, cap=2.0, token_mask=(0.5, 2.0)),
    ),
}


@pytest.mark.parametrize("minibatches", [1, 3])
@pytest.mark.parametrize("extensions", [OURS, frozenset()], ids=["ours", "tinker"])
@pytest.mark.parametrize("case", CASES)
def test_weights_after_each_optimizer_step_equal_the_reference(case, extensions, minibatches):
    loss, correction, reference = CASES[case]
    batch = groups()
    table = Table()

    async def proximal(rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        return [table.logprobs(row.tokens, row.targets).detach().numpy().astype(np.float32) for row in rows]

    settings = config(
        "grpo",
        loss=loss,
        correction=correction,
        aggregate="token_mean",
        advantage={"type": "grpo", "normalize": "none", "std_threshold": None},
    )
    division = UpdatesConfig(minibatches=minibatches, epochs=2)
    algorithm = Algorithm(settings, extensions, {"proximal": proximal}, 0, 4, division)
    updates = run(algorithm.score(1, batch)).updates
    expected = reference.trained(Table(), batch, minibatches, 2)
    weights = trained_by_updates(updates, table)
    assert len(weights) == len(expected) == 2 * minibatches
    for ours, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)
    moved = (expected[-1] - expected[0]).abs().max() if len(expected) > 1 else torch.ones(())
    assert moved > 0.01


def test_gradients_of_parts_add_up_to_that_of_the_batch():
    batch = groups()
    for loss, kl in (({"type": "importance_sampling"}, {}), ({"type": "topr"}, {"kl": {"type": "k2", "coef": 0.1}})):
        settings = config("grpo", loss=loss, **kl)
        assert not settings.stream_fault
        whole, parts = [], []
        for division, gradients in (([batch], whole), ([batch[:1], batch[1:]], parts)):
            table = Table()
            algorithm = Algorithm(settings, OURS, {"reference": reference_logprobs}, 0, 4)
            for part in division:
                update = run(algorithm.score_part(1, part))
                leaves = [table.logprobs(row.tokens, row.targets) for row in update.rows]
                torch.autograd.backward(leaves, grads(update, [leaf.detach().requires_grad_() for leaf in leaves]))
            gradients.append(table.logits.grad)
        torch.testing.assert_close(whole[0], parts[0], rtol=1e-9, atol=1e-12)
        assert whole[0].abs().max() > 0.01


async def reference_logprobs(rows: Sequence[TrainingRow]) -> list[np.ndarray]:
    return [np.where(row.mask, row.logprobs - 0.1, 0.0).astype(np.float32) for row in rows]


def test_each_epoch_covers_every_group_once_and_keeps_it_whole():
    batch = [group for _ in range(3) for group in groups()][:7]
    settings = config("grpo", aggregate="token_mean", merge_replies=False)
    division = UpdatesConfig(minibatches=3, epochs=4, shuffle=True)
    updates = run(Algorithm(settings, OURS, {}, 5, 4, division).score(2, batch)).updates
    assert len(updates) == 12
    orders = set()
    for epoch in range(4):
        of_epoch = updates[3 * epoch : 3 * epoch + 3]
        assert sorted(len(update.rows) for update in of_epoch) == [8, 8, 12]
        assert len({id(row) for update in of_epoch for row in update.rows}) == 28
        orders.add(tuple(id(row) for update in of_epoch for row in update.rows))
    assert len(orders) == 4
    again = run(Algorithm(settings, OURS, {}, 5, 4, division).score(2, batch)).updates
    assert [[row.tokens.tolist() for row in each.rows] for each in again] == [
        [row.tokens.tolist() for row in each.rows] for each in updates
    ]
