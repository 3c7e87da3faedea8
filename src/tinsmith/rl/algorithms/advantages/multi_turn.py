"""Advantages of multi-turn rollouts: comparisons of whole rollouts, and of turns taken from the same state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field
from typing_extensions import override

from tinsmith.errors import ConfigError
from tinsmith.rl.algorithms.advantages.base import Advantage, Advantages, Trace, Traces, net_rewards, sample_std
from tinsmith.rl.algorithms.advantages.group import GrpoAdvantage, NormalizedAdvantage

_FLOOR = 1e-6


class StepWiseGrpoAdvantage(NormalizedAdvantage):
    """GRPO over whole rollouts: the same advantage at every turn."""

    type: Literal["step_wise_grpo"] = "step_wise_grpo"
    by_turns: bool = False
    """Divide the advantage of a rollout by its number of turns."""

    @override
    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        grpo = GrpoAdvantage(**self.model_dump(exclude={"type", "by_turns"}))
        advantages = grpo.compute(traces_PG, random)
        if not self.by_turns:
            return advantages
        return [
            [values / max(1, len(trace.turns)) for values, trace in zip(values_G, traces_G, strict=False)]
            for values_G, traces_G in zip(advantages, traces_PG, strict=True)
        ]


class GigpoAdvantage(Advantage):
    """Rollouts compared in their group, plus omega times turns compared at equal states (GiGPO, arXiv 2505.10978).

    Turns are compared by their return R_t = r_t + gamma R_{t+1} with all turns of the group taken from the same state;
    a state that occurs once adds 0. The part of the rollout's reward that no turn was given goes to the last turn.
    """

    type: Literal["gigpo"] = "gigpo"
    reads_states: ClassVar[bool] = True
    gamma: float = Field(default=0.95, ge=0, le=1)
    """Discount of the return from turn to turn."""
    omega: float = Field(default=1.0, ge=0)
    """Weight of the comparison of turns; 0 compares whole rollouts only."""
    normalize: bool = False
    """Divide by the standard deviation; false is F_norm = 1 in the paper."""

    @override
    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        """Advantages of all tokens. Raises ConfigError if a turn has no state."""
        return [self._group_advantages(traces_G) for traces_G in traces_PG]

    def _group_advantages(self, traces_G: Sequence[Trace]) -> list[np.ndarray]:
        """Equal states of different tasks are different states, so that turns are compared within a group."""
        returns_G = [self._returns(trace) for trace in traces_G]
        buckets: dict[str, list[float]] = defaultdict(list)
        for trace, values in zip(traces_G, returns_G, strict=True):
            if len(trace.states) != len(trace.turns) or not all(trace.states):
                raise ConfigError(
                    "gigpo compares turns by state, but a turn of this workflow has no state.",
                    "Set it with every turn: conversation.say(…, state=…), or Answer(state=…) in begin and step.",
                )
            for state, value in zip(trace.states, values, strict=True):
                buckets[state].append(value)
        whole_G = self._compared(net_rewards(traces_G))
        return [
            self._tokens(trace, float(whole), values, buckets)
            for trace, whole, values in zip(traces_G, whole_G, returns_G, strict=True)
        ]

    def _returns(self, trace: Trace) -> list[float]:
        """Discounted return of each turn. The reward that no turn was given goes to the last turn."""
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
