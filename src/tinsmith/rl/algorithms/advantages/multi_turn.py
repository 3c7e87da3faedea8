"""Advantages of rollouts of many turns: what a whole rollout is worth, and what a turn is worth where it was taken."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from tinsmith.errors import ConfigError
from tinsmith.rl.algorithms.advantages.base import Advantage, Advantages, Trace, Traces, net_rewards, sample_std
from tinsmith.rl.algorithms.advantages.group import GrpoAdvantage

_FLOOR = 1e-6


class StepWiseGrpoAdvantage(Advantage):
    """GRPO over whole rollouts, the same advantage at every turn."""

    type: Literal["step_wise_grpo"] = "step_wise_grpo"
    normalize: Literal["none", "group", "batch"] = "group"
    """As of grpo."""
    std_threshold: float | None = Field(default=None, ge=0)
    """As of grpo."""
    by_turns: bool = False
    """Divide a rollout's advantage by the number of its turns."""

    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        """The reward that counts is the rollout's."""
        plain = GrpoAdvantage(normalize=self.normalize, std_threshold=self.std_threshold).compute(traces_PG, random)
        if not self.by_turns:
            return plain
        return [
            [values / max(1, len(trace.turns)) for values, trace in zip(values_G, traces_G, strict=False)]
            for values_G, traces_G in zip(plain, traces_PG, strict=True)
        ]


class GigpoAdvantage(Advantage):
    """A group's comparison of whole rollouts plus omega times one of turns taken from equal states (arXiv 2505.10978).

    Turns are compared by R_t = r_t + gamma R_{t+1} with all turns of the step that saw the same state; a state seen
    once adds nothing. What the rollout is worth beside its turns' rewards is the last one's.
    """

    type: Literal["gigpo"] = "gigpo"
    reads_states: ClassVar[bool] = True
    gamma: float = Field(default=0.95, ge=0, le=1)
    """Discount from turn to turn."""
    omega: float = Field(default=1.0, ge=0)
    """Weight of the comparison of turns."""
    normalize: bool = False
    """Divide by the deviation; off is the paper's F_norm = 1."""

    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        """Raises ConfigError if a turn has no state."""
        returns = [[self._returns(trace) for trace in traces_G] for traces_G in traces_PG]
        buckets: dict[str, list[float]] = defaultdict(list)
        for traces_G, returns_G in zip(traces_PG, returns, strict=True):
            for trace, values in zip(traces_G, returns_G, strict=True):
                if len(trace.states) != len(trace.turns) or not all(trace.states):
                    raise ConfigError(
                        "gigpo compares turns by state, and a turn of this workflow has none.",
                        "Set it with every turn: conversation.say(…, state=…), or Answer(state=…) of begin and step.",
                    )
                for state, value in zip(trace.states, values, strict=True):
                    buckets[state].append(value)
        found: Advantages = []
        for traces_G, returns_G in zip(traces_PG, returns, strict=True):
            whole_G = self._compared(net_rewards(traces_G))
            found.append(
                [
                    self._tokens(trace, float(whole), values, buckets)
                    for trace, whole, values in zip(traces_G, whole_G, returns_G, strict=True)
                ]
            )
        return found

    def _returns(self, trace: Trace) -> list[float]:
        """[turns]; what the rollout is worth beside the rewards of its turns comes with the last one."""
        rewards = [0.0 if reward is None else reward for reward in trace.turn_rewards] or [0.0] * len(trace.turns)
        if rewards:
            rewards[-1] += trace.net_reward - sum(rewards)
        returns: list[float] = []
        following = 0.0
        for reward in reversed(rewards):
            following = reward + self.gamma * following
            returns.append(following)
        return returns[::-1]

    def _compared(self, values: np.ndarray) -> np.ndarray:
        if len(values) < 2:
            return np.zeros(len(values))
        return (values - values.mean()) / (sample_std(values) + _FLOOR if self.normalize else 1.0)

    def _tokens(
        self, trace: Trace, whole: float, returns: Sequence[float], buckets: dict[str, list[float]]
    ) -> np.ndarray:
        pieces = [np.zeros(0)]
        for length, state, value in zip(trace.turns, trace.states, returns, strict=True):
            peers = np.array(buckets[state])
            scale = sample_std(peers) + _FLOOR if self.normalize else 1.0
            step = (value - float(peers.mean())) / scale if len(peers) > 1 else 0.0
            pieces.append(np.full(length, whole + self.omega * step))
        return np.concatenate(pieces)
