"""What advantages are computed from and what they are: numbers for each token that the policy spoke.

Pure arithmetic in float64 on the CPU. Where numbers of the reference, a teacher or a critic are wanted, an advantage
lists them in `columns` and reads them from the columns of a trace. It sends no requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from tinsmith.rl.types import POLICY, Rollout
from tinsmith.settings import Settings

Traces = Sequence[Sequence["Trace"]]
"""[P][G] the rollouts of a step by group, failed ones left out."""
Advantages = list[list[np.ndarray]]
"""[P][G] float64 [T] of each trace; an empty array leaves a reply out, an empty list its whole group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One rollout: T tokens of the policy in order, over all its turns.

    Example: Trace(reward=1.0, logprobs=np.array([-0.4, -0.1]), turns=(2,))
    """

    reward: float
    logprobs: np.ndarray
    """float64 [T] of the sampler."""
    turns: tuple[int, ...]
    """Tokens of each turn of the policy; they add up to T."""
    turn_rewards: tuple[float | None, ...] = ()
    """Of each turn, where the workflow gave one."""
    states: tuple[str, ...] = ()
    """What the policy was looking at before each turn, as a word that is equal for equal states; empty: not known."""
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """float64 [T] by name: reference, teacher, values, entropy."""
    penalty: np.ndarray | None = None
    """float64 [T] taken off the reward at each token."""

    @property
    def length(self) -> int:
        """T."""
        return len(self.logprobs)

    @property
    def token_rewards(self) -> np.ndarray:
        """float64 [T]: each turn's reward on its last token, the rest of the whole on the last, less the penalty."""
        rewards = np.zeros(self.length)
        ends = np.cumsum(self.turns) - 1
        given = 0.0
        for end, reward in zip(ends, self.turn_rewards, strict=False):
            if reward is not None and end >= 0:
                rewards[end] += reward
                given += reward
        if self.length:
            rewards[-1] += self.reward - given
        return rewards if self.penalty is None else rewards - self.penalty

    @property
    def net_reward(self) -> float:
        """The reward less all penalties."""
        return self.reward - (0.0 if self.penalty is None else float(self.penalty.sum()))

    def full(self, value: float) -> np.ndarray:
        """`value` at every token."""
        return np.full(self.length, value)

    def with_columns(self, columns: Mapping[str, np.ndarray]) -> Trace:
        """The same with more columns."""
        return replace(self, columns={**self.columns, **columns})


def trace_from_rollout(rollout: Rollout) -> Trace:
    """What a rollout that did not fail is to advantages."""
    turns = [turn for turn in rollout.turns if turn.role == POLICY]
    return Trace(
        reward=rollout.reward,
        logprobs=np.concatenate([np.zeros(0), *(np.asarray(turn.logprobs, np.float64) for turn in turns)]),
        turns=tuple(len(turn.tokens) for turn in turns),
        turn_rewards=tuple(turn.reward for turn in turns),
        states=tuple(turn.state for turn in turns),
    )


class Advantage(Settings):
    """Base class of advantages."""

    columns: ClassVar[frozenset[str]] = frozenset()
    """Columns that it reads."""
    reads_rewards: ClassVar[bool] = True
    """Whether it reads rewards."""
    reads_states: ClassVar[bool] = False
    """Whether it reads the state of each turn."""

    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        """The advantages of all tokens. `random` is for methods that sample."""
        raise NotImplementedError


def broadcast(traces_G: Sequence[Trace], values_G: np.ndarray) -> list[np.ndarray]:
    """One number per trace, repeated for all its tokens."""
    return [trace.full(float(value)) for trace, value in zip(traces_G, values_G, strict=True)]


def net_rewards(traces_G: Sequence[Trace]) -> np.ndarray:
    """float64 [G]."""
    return np.array([trace.net_reward for trace in traces_G], np.float64)


def sample_std(values: np.ndarray) -> float:
    """Of a sample: divided by n - 1; 1 where there is only one value."""
    return float(values.std(ddof=1)) if len(values) > 1 else 1.0


def whiten(values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """(x - mean) / sqrt(variance + 1e-8) over all numbers together, the variance that of a sample."""
    together = np.concatenate([np.zeros(0), *values])
    if len(together) < 2:
        return [np.array(one, np.float64) for one in values]
    scale = 1.0 / np.sqrt(together.var(ddof=1) + 1e-8)
    return [(one - together.mean()) * scale for one in values]
