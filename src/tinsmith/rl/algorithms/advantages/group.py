"""Advantages that compare the rewards of a group: one value for all tokens of a rollout.

Methods that compare turns are in `multi_turn`; methods with a value for each token are in `per_token`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field
from typing_extensions import override

from tinsmith.rl.algorithms.advantages.base import (
    Advantage,
    Advantages,
    Trace,
    Traces,
    broadcast,
    net_rewards,
)
from tinsmith.settings import Needs

_FLOOR = 1e-6
_NO_DEVIATION = 1e-8
"""Rewards with a smaller standard deviation count as equal."""


class NormalizedAdvantage(Advantage):
    """Base class of advantages that may be divided by a standard deviation of rewards."""

    normalize: Literal["none", "group", "batch"] = "group"
    """Divide by the standard deviation of the group's rewards, or of all rewards of the step (`batch`)."""
    std: Annotated[Literal["sample", "population"], Needs("normalize", ("group", "batch"))] = "sample"
    """Standard deviation to divide by: of n rewards, `sample` divides the squares by n - 1, `population` by n."""
    epsilon: Annotated[float, Needs("normalize", ("group", "batch"))] = Field(default=_FLOOR, ge=0)
    """Added to the standard deviation. With 0, advantages are not divided by a deviation of 1e-8 or less."""
    std_threshold: float | None = Field(default=None, ge=0)
    """Drop groups whose standard deviation is at most this, and groups of one; not set: keep all groups."""

    @property
    @override
    def of_groups(self) -> bool:
        return self.normalize != "batch"

    def deviation(self, rewards: np.ndarray) -> float:
        """The standard deviation; 1 for fewer than two rewards."""
        return float(rewards.std(ddof=self.std == "sample")) if len(rewards) > 1 else 1.0

    def scale(self, rewards_G: np.ndarray, all_rewards: np.ndarray) -> float:
        """The divisor of a group's advantages."""
        if self.normalize == "none":
            return 1.0
        deviation = self.deviation(rewards_G if self.normalize == "group" else all_rewards)
        return deviation + self.epsilon if self.epsilon or deviation > _NO_DEVIATION else 1.0

    def is_dropped(self, rewards_G: np.ndarray) -> bool:
        """Whether `std_threshold` drops the group."""
        if self.std_threshold is None:
            return False
        return len(rewards_G) < 2 or self.deviation(rewards_G) <= self.std_threshold


class GrpoAdvantage(NormalizedAdvantage):
    """(r - mean) / (standard deviation + epsilon), GRPO (arXiv 2402.03300); without division, Dr. GRPO (2503.20783).

    The mean is the group's; in a group of one it is 0, and the deviation is 1.
    """

    type: Literal["grpo"] = "grpo"
    rank_penalty: float = Field(default=0.0, ge=0)
    """Weight p of the likelihood rank: mean and standard deviation are those of r (1 - p rank / G), with rank 0 for the
    least likely reply."""

    @override
    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        all_rewards = np.concatenate([np.zeros(0), *(net_rewards(traces_G) for traces_G in traces_PG)])
        advantages: Advantages = []
        for traces_G in traces_PG:
            rewards_G = net_rewards(traces_G)
            compared_G = rewards_G * self._ranked(traces_G) if self.rank_penalty else rewards_G
            if self.is_dropped(compared_G):
                advantages.append([])
                continue
            mean = float(compared_G.mean()) if len(compared_G) > 1 else 0.0
            advantages.append(broadcast(traces_G, (rewards_G - mean) / self.scale(compared_G, all_rewards)))
        return advantages

    def _ranked(self, traces_G: Sequence[Trace]) -> np.ndarray:
        means_G = np.array([trace.logprobs.mean() if trace.length else 0.0 for trace in traces_G])
        ranks_G = np.argsort(np.argsort(means_G, kind="stable"), kind="stable")
        return 1.0 - self.rank_penalty * ranks_G / len(means_G)


class OpmdAdvantage(Advantage):
    """r - b, with the group's baseline b: its mean reward, or tau (logsumexp(r / tau) - log G).

    `shift` is subtracted from b. In a group of one, b is 0 and not shifted.
    """

    type: Literal["opmd"] = "opmd"
    baseline: Literal["mean", "logavgexp"] = "mean"
    """Baseline of a group: `mean` of its rewards, or `logavgexp`, tau (logsumexp(r / tau) - log G)."""
    tau: Annotated[float, Needs("baseline", ("logavgexp",))] = Field(default=1.0, gt=0)
    """Temperature tau of logavgexp: a lower one moves the baseline towards the best reward."""
    shift: float = 0.0
    """Subtracted from the baseline; AsymRE uses 0.1 (arXiv 2506.20520)."""

    @override
    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        return [
            broadcast(traces_G, net_rewards(traces_G) - self._baseline(net_rewards(traces_G))) for traces_G in traces_PG
        ]

    def _baseline(self, rewards_G: np.ndarray) -> float:
        if len(rewards_G) < 2:
            return 0.0
        if self.baseline == "mean":
            return float(rewards_G.mean()) - self.shift
        scaled = rewards_G / self.tau
        top = float(scaled.max())
        return self.tau * (top + math.log(float(np.exp(scaled - top).mean()))) - self.shift


class ReinforceAdvantage(Advantage):
    """The reward itself, without a baseline."""

    type: Literal["reinforce"] = "reinforce"
    compares: ClassVar[bool] = False

    @override
    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        return [broadcast(traces_G, net_rewards(traces_G)) for traces_G in traces_PG]


class RlooAdvantage(Advantage):
    """r minus the mean reward of the group's other rollouts (arXiv 2402.14740); in a group of one, r itself."""

    type: Literal["rloo"] = "rloo"

    @override
    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        advantages: Advantages = []
        for traces_G in traces_PG:
            rewards_G, size = net_rewards(traces_G), len(traces_G)
            advantages.append(
                broadcast(traces_G, (rewards_G - rewards_G.mean()) * size / (size - 1) if size > 1 else rewards_G)
            )
        return advantages


class RecAdvantage(Advantage):
    """r - mean, optionally divided by the standard deviation, over the replies not dropped (arXiv 2509.24203).

    Dropped replies have advantage 0; in a group of one, the advantage is the reward.
    """

    type: Literal["rec"] = "rec"
    normalize: bool = False
    """Divide by the standard deviation of the rewards that are not dropped."""
    drop: Literal["none", "balance"] = "none"
    """`balance` drops random replies below the mean until they are no more than those at or above it."""

    @property
    @override
    def of_groups(self) -> bool:
        return self.drop == "none"

    @override
    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        return [broadcast(traces_G, self._group_advantages(net_rewards(traces_G), random)) for traces_G in traces_PG]

    def _group_advantages(self, rewards_G: np.ndarray, random: np.random.Generator) -> np.ndarray:
        if len(rewards_G) < 2:
            return rewards_G
        selected_G = np.ones(len(rewards_G), bool)
        if self.drop == "balance":
            below = np.flatnonzero(rewards_G < rewards_G.mean())
            surplus = len(below) - int((rewards_G >= rewards_G.mean()).sum())
            if surplus > 0:
                selected_G[random.choice(below, surplus, replace=False)] = False
        scale = float(rewards_G[selected_G].std()) + _FLOOR if self.normalize else 1.0
        return np.where(selected_G, (rewards_G - rewards_G[selected_G].mean()) / scale, 0.0)


class BestAdvantage(Advantage):
    """1 for the best reply of a group, the first of equals; the others are dropped (RAFT, arXiv 2304.06767)."""

    type: Literal["best"] = "best"
    compares: ClassVar[bool] = False
    above: float = 0.0
    """Drop groups whose best reward is not above this."""

    @override
    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        advantages: Advantages = []
        for traces_G in traces_PG:
            rewards_G = net_rewards(traces_G)
            if not len(rewards_G) or rewards_G.max() <= self.above:
                advantages.append([])
                continue
            best = int(rewards_G.argmax())
            advantages.append([trace.full(1.0) if at == best else np.zeros(0) for at, trace in enumerate(traces_G)])
        return advantages


class ClipBAdvantage(Advantage):
    """grpo with A = 0 at tokens with A < 0 and S - mean(S) < -mu std(S), where S = P (H + log P).

    P is the probability of the token, H the entropy at its position; mean and std are over all tokens of the step.
    """

    type: Literal["clipb"] = "clipb"
    columns: ClassVar[frozenset[str]] = frozenset({"entropy"})
    compares_policy: ClassVar[bool] = True
    mu: float = Field(default=2.5, ge=0)
    """Keep tokens with A < 0 whose S is at most this many standard deviations below its mean."""
    normalize: Literal["none", "group", "batch"] = "group"
    """Divide by the sample standard deviation of the group's rewards, or of all rewards of the step (`batch`)."""

    @property
    @override
    def of_groups(self) -> bool:
        return False

    @override
    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        advantages = GrpoAdvantage(normalize=self.normalize).compute(traces_PG, random)
        signals = [
            [np.exp(trace.logprobs) * (trace.columns["entropy"] + trace.logprobs) for trace in traces_G]
            for traces_G in traces_PG
        ]
        all_signals = np.concatenate([np.zeros(0), *(signal for signals_G in signals for signal in signals_G)])
        floor = float(all_signals.mean() - self.mu * all_signals.std()) if len(all_signals) else 0.0
        return [
            [
                np.where((values > 0) | (signal >= floor), values, 0.0)
                for values, signal in zip(values_G, signals_G, strict=True)
            ]
            for values_G, signals_G in zip(advantages, signals, strict=True)
        ]
