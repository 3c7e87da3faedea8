"""Advantages that compare the rewards of a group: one number for a rollout, at all its tokens.

Left out: those that compare turns (`turns`) and those that look at single tokens (`tokens`, `distill`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from tinsmith.rl.algorithms.advantages.base import (
    Advantage,
    Advantages,
    Trace,
    Traces,
    broadcast,
    net_rewards,
    sample_std,
)
from tinsmith.settings import Needs

_FLOOR = 1e-6


class GrpoAdvantage(Advantage):
    """(r - mean) / (deviation + 1e-6), GRPO (arXiv 2402.03300); without the division, Dr. GRPO (arXiv 2503.20783)."""

    type: Literal["grpo"] = "grpo"
    normalize: Literal["none", "group", "batch"] = "group"
    """Divide by the sample's standard deviation of the group, or of all rewards of the step."""
    std_threshold: float | None = Field(default=None, ge=0)
    """Drop groups whose deviation is at most this, and groups of one; not set: keep all."""
    rank_penalty: float = Field(default=0.0, ge=0)
    """p: mean and deviation are those of r (1 - p rank / G), rank 0 the least likely reply."""

    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        """A group of one has mean 0 and deviation 1."""
        every = np.concatenate([np.zeros(0), *(net_rewards(traces_G) for traces_G in traces_PG)])
        found: Advantages = []
        for traces_G in traces_PG:
            rewards_G = net_rewards(traces_G)
            compared_G = rewards_G * self._ranked(traces_G) if self.rank_penalty else rewards_G
            if self.std_threshold is not None and not self._differs(compared_G):
                found.append([])
                continue
            mean = float(compared_G.mean()) if len(compared_G) > 1 else 0.0
            scale = {"none": 1.0, "group": sample_std(compared_G) + _FLOOR, "batch": sample_std(every) + _FLOOR}
            found.append(broadcast(traces_G, (rewards_G - mean) / scale[self.normalize]))
        return found

    def _differs(self, rewards_G: np.ndarray) -> bool:
        return len(rewards_G) > 1 and sample_std(rewards_G) > (self.std_threshold or 0.0)

    def _ranked(self, traces_G: Sequence[Trace]) -> np.ndarray:
        means_G = np.array([trace.logprobs.mean() if trace.length else 0.0 for trace in traces_G])
        ranks_G = np.argsort(np.argsort(means_G, kind="stable"), kind="stable")
        return 1.0 - self.rank_penalty * ranks_G / len(means_G)


class OpmdAdvantage(Advantage):
    """r - b, the baseline of a group: its mean, or tau (logsumexp(r / tau) - log G)."""

    type: Literal["opmd"] = "opmd"
    baseline: Literal["mean", "logavgexp"] = "mean"
    """Of a group."""
    tau: Annotated[float, Needs("baseline", ("logavgexp",))] = Field(default=1.0, gt=0)
    """Temperature of logavgexp."""
    shift: float = 0.0
    """Taken off the baseline: 0.1 is AsymRE's (arXiv 2506.20520)."""

    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        """A group of one has baseline 0, less the shift."""
        return [
            broadcast(traces_G, net_rewards(traces_G) - self._baseline(net_rewards(traces_G))) for traces_G in traces_PG
        ]

    def _baseline(self, rewards_G: np.ndarray) -> float:
        if len(rewards_G) < 2:
            return -self.shift
        if self.baseline == "mean":
            return float(rewards_G.mean()) - self.shift
        scaled = rewards_G / self.tau
        top = float(scaled.max())
        return self.tau * (top + math.log(float(np.exp(scaled - top).mean()))) - self.shift


class ReinforceAdvantage(Advantage):
    """The reward itself."""

    type: Literal["reinforce"] = "reinforce"

    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        """No baseline."""
        return [broadcast(traces_G, net_rewards(traces_G)) for traces_G in traces_PG]


class RlooAdvantage(Advantage):
    """r less the mean of the others' rewards (arXiv 2402.14740)."""

    type: Literal["rloo"] = "rloo"

    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        """A group of one keeps its reward."""
        found: Advantages = []
        for traces_G in traces_PG:
            rewards_G, size = net_rewards(traces_G), len(traces_G)
            found.append(
                broadcast(traces_G, (rewards_G - rewards_G.mean()) * size / (size - 1) if size > 1 else rewards_G)
            )
        return found


class RecAdvantage(Advantage):
    """r - mean of those kept, perhaps over their deviation (arXiv 2509.24203)."""

    type: Literal["rec"] = "rec"
    normalize: bool = False
    """Divide by the deviation of those kept."""
    drop: Literal["none", "balance"] = "none"
    """`balance` drops replies below the mean, at random, until they are no more than those above."""

    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        """A dropped reply has advantage 0."""
        return [broadcast(traces_G, self._of_group(net_rewards(traces_G), random)) for traces_G in traces_PG]

    def _of_group(self, rewards_G: np.ndarray, random: np.random.Generator) -> np.ndarray:
        if len(rewards_G) < 2:
            return rewards_G
        kept_G = np.ones(len(rewards_G), bool)
        if self.drop == "balance":
            below = np.flatnonzero(rewards_G < rewards_G.mean())
            surplus = len(below) - int((rewards_G >= rewards_G.mean()).sum())
            if surplus > 0:
                kept_G[random.choice(below, surplus, replace=False)] = False
        scale = float(rewards_G[kept_G].std()) + _FLOOR if self.normalize else 1.0
        return np.where(kept_G, (rewards_G - rewards_G[kept_G].mean()) / scale, 0.0)


class BestAdvantage(Advantage):
    """1 for the best reply of a group, the others left out: rejection sampling (RAFT, arXiv 2304.06767)."""

    type: Literal["best"] = "best"
    above: float = 0.0
    """A group whose best reward is not above this is dropped."""

    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        """Among equals the first."""
        found: Advantages = []
        for traces_G in traces_PG:
            rewards_G = net_rewards(traces_G)
            if not len(rewards_G) or rewards_G.max() <= self.above:
                found.append([])
                continue
            best = int(rewards_G.argmax())
            found.append([trace.full(1.0) if at == best else np.zeros(0) for at, trace in enumerate(traces_G)])
        return found


class ClipBAdvantage(Advantage):
    """S = p (H + log p): keep A > 0, and A < 0 where S - mean(S) >= -mu std(S)."""

    type: Literal["clipb"] = "clipb"
    columns: ClassVar[frozenset[str]] = frozenset({"entropy"})
    mu: float = Field(default=2.5, ge=0)
    """How many deviations below the mean are kept."""
    normalize: Literal["none", "group", "batch"] = "group"
    """As of grpo."""

    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        """Mean and deviation are over all tokens of the step."""
        plain = GrpoAdvantage(normalize=self.normalize).compute(traces_PG, random)
        signals = [
            [np.exp(trace.logprobs) * (trace.columns["entropy"] + trace.logprobs) for trace in traces_G]
            for traces_G in traces_PG
        ]
        every = np.concatenate([np.zeros(0), *(signal for signals_G in signals for signal in signals_G)])
        floor = float(every.mean() - self.mu * every.std()) if len(every) else 0.0
        return [
            [
                np.where((values > 0) | (signal >= floor), values, 0.0)
                for values, signal in zip(values_G, signals_G, strict=True)
            ]
            for values_G, signals_G in zip(plain, signals, strict=True)
        ]
