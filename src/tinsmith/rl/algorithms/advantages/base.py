"""Traces, from which advantages are computed, and the base class of advantages.

Pure arithmetic in float64 on the CPU, without requests. An advantage that reads numbers of the reference, a teacher or
a critic lists them in `columns`; the trace holds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from tinsmith.rl.policy.training_rows import trained_turns
from tinsmith.rl.types import Task, Trajectory
from tinsmith.settings import Settings

Traces = Sequence[Sequence["Trace"]]
"""[P][G]: the trajectories of a step by comparison group, without those of failed rollouts."""
Advantages = list[list[np.ndarray]]
"""[P][G] float64 [T] for each trace. An empty array drops a trajectory; an empty list drops its group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One trajectory as advantages see it: its T tokens to train on, over all turns.

    Example: Trace(reward=1.0, logprobs=np.array([-0.4, -0.1]), turns=(2,))
    """

    reward: float
    logprobs: np.ndarray
    """float64 [T]: logprobs of the sampling policy."""
    turns: tuple[int, ...]
    """Number of tokens of each trained turn; the sum is T."""
    turn_rewards: tuple[float | None, ...] = ()
    """Reward of each turn; None for a turn without one."""
    states: tuple[str, ...] = ()
    """Key of the state before each turn, equal for equal states; empty if the workflow sets none."""
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """float64 [T] by name: reference, teacher, values or entropy."""
    penalty: np.ndarray | None = None
    """float64 [T]: KL penalty, subtracted from the reward at each token."""
    turn_advantages: tuple[float | tuple[float, ...] | None, ...] = ()
    """Advantages of each turn that the workflow computed; None for a turn without."""
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64 [T]: the tokens."""
    trajectory: Trajectory | None = None
    """The whole trajectory, with the texts and prompts of its turns."""
    task: Task | None = None
    """The task of the group."""

    @property
    def length(self) -> int:
        """Number of tokens, T."""
        return len(self.logprobs)

    @property
    def token_rewards(self) -> np.ndarray:
        """float64 [T]: rewards of turns at their last tokens, the remaining reward at the end, minus penalties."""
        rewards = np.zeros(self.length)
        ends = np.cumsum(self.turns) - 1
        assigned = 0.0
        for end, reward in zip(ends, self.turn_rewards, strict=False):
            if reward is not None and end >= 0:
                rewards[end] += reward
                assigned += reward
        if self.length:
            rewards[-1] += self.reward - assigned
        return rewards if self.penalty is None else rewards - self.penalty

    @property
    def net_reward(self) -> float:
        """The reward minus the penalties of all tokens."""
        return self.reward - (0.0 if self.penalty is None else float(self.penalty.sum()))

    def full(self, value: float) -> np.ndarray:
        """float64 [T], filled with `value`."""
        return np.full(self.length, value)

    def with_columns(self, columns: Mapping[str, np.ndarray]) -> Trace:
        """A copy with additional columns."""
        return replace(self, columns={**self.columns, **columns})


def trace_from_trajectory(trajectory: Trajectory, task: Task | None = None) -> Trace:
    """The trace of a trajectory, which is of a rollout of `task`."""
    turns = trained_turns(trajectory)
    return Trace(
        reward=trajectory.reward,
        logprobs=np.concatenate([np.zeros(0), *(np.asarray(turn.logprobs, np.float64) for turn in turns)]),
        turns=tuple(len(turn.tokens) for turn in turns),
        turn_rewards=tuple(turn.reward for turn in turns),
        states=tuple(turn.state for turn in turns),
        turn_advantages=tuple(turn.advantages for turn in turns),
        tokens=np.concatenate([np.zeros(0, np.int64), *(np.asarray(turn.tokens, np.int64) for turn in turns)]),
        trajectory=trajectory,
        task=task,
    )


def with_turn_returns(trace: Trace, discount: float) -> Trace:
    """The trace with the rewards of turns replaced by returns R_t = r_t + discount R_{t+1}.

    The part of the trajectory's reward that no turn was given goes to the last turn.
    """
    rewards = [0.0 if reward is None else reward for reward in trace.turn_rewards]
    if rewards:
        rewards[-1] += trace.reward - sum(rewards)
    returns: list[float] = []
    for reward in reversed(rewards):
        returns.append(reward + discount * (returns[-1] if returns else 0.0))
    return replace(trace, turn_rewards=tuple(reversed(returns)))


def traces_of_turns(trace: Trace) -> list[Trace]:
    """A trace for each turn. Its reward is the turn's, or the trajectory's where the turn has none."""
    traces, begin = [], 0
    for index, count in enumerate(trace.turns):
        tokens, reward = slice(begin, begin + count), trace.turn_rewards[index]
        traces.append(
            Trace(
                reward=trace.reward if reward is None else reward,
                logprobs=trace.logprobs[tokens],
                turns=(count,),
                turn_rewards=(reward,),
                states=trace.states[index : index + 1],
                columns={name: column[tokens] for name, column in trace.columns.items()},
                penalty=None if trace.penalty is None else trace.penalty[tokens],
                turn_advantages=trace.turn_advantages[index : index + 1],
                tokens=trace.tokens[tokens],
                trajectory=trace.trajectory,
                task=trace.task,
            )
        )
        begin += count
    return traces


class Advantage(Settings):
    """Base class of advantages: settings of a method, and `compute`."""

    columns: ClassVar[frozenset[str]] = frozenset()
    """Per-token columns that the method reads."""
    reads_rewards: ClassVar[bool] = True
    """Whether the method reads rewards."""
    compares_policy: ClassVar[bool] = False
    """Whether the method reads the sampler's logprobs as those of the policy."""
    reads_states: ClassVar[bool] = False
    """Whether the method reads the state before each turn."""
    compares: ClassVar[bool] = True
    """Whether the method compares the trajectories of a group, so that one whose siblings failed has no baseline."""

    @property
    def of_groups(self) -> bool:
        """Whether the advantages of a group do not depend on other groups of the step."""
        return True

    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        """Advantages of all tokens. `random`: generator of the step, for methods that draw."""
        raise NotImplementedError


def broadcast(traces_G: Sequence[Trace], values_G: np.ndarray) -> list[np.ndarray]:
    """One value for each trace, repeated for all its tokens."""
    return [trace.full(float(value)) for trace, value in zip(traces_G, values_G, strict=True)]


def net_rewards(traces_G: Sequence[Trace]) -> np.ndarray:
    """Rewards of a group minus penalties, float64 [G]."""
    return np.array([trace.net_reward for trace in traces_G], np.float64)


def sample_std(values: np.ndarray) -> float:
    """Sample standard deviation (divided by n - 1); 1 for fewer than two values."""
    return float(values.std(ddof=1)) if len(values) > 1 else 1.0


def whiten(values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """(x - mean) / sqrt(variance + 1e-8), with mean and sample variance over all arrays together."""
    flat = np.concatenate([np.zeros(0), *values])
    if len(flat) < 2:
        return [np.array(array, np.float64) for array in values]
    scale = 1.0 / np.sqrt(flat.var(ddof=1) + 1e-8)
    return [(array - flat.mean()) * scale for array in values]
