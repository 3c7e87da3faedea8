"""Reward functions. Each one is a settings class; a run file lists those of the run.

The reward of a rollout is their weighted sum. Each reward is also recorded by name, before its weight. A reward that
raises marks the rollout as failed, with the error; it does not stop the run.

Example: Closeness().score(task_with_answer_52, "50") == 0.5 * (1 - 2 / 52)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from tinsmith.errors import ConfigError
from tinsmith.plurals import counted
from tinsmith.rl.guards.user_code import run_user_code
from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.rewards.base import Reward, Score, all_correct
from tinsmith.rl.rewards.code import CodeTests
from tinsmith.rl.rewards.compared import score_by
from tinsmith.rl.rewards.countdown import Countdown
from tinsmith.rl.rewards.custom import CustomReward
from tinsmith.rl.rewards.format import Format, Overlong
from tinsmith.rl.rewards.gym import ReasoningGymScore
from tinsmith.rl.rewards.implicit_reward import ImplicitReward
from tinsmith.rl.rewards.judge import Judge
from tinsmith.rl.rewards.mathematics import Math, MathBoxed, MathVerify
from tinsmith.rl.rewards.numbers import Closeness, Marked, Number
from tinsmith.rl.rewards.rank_judge import RankJudge
from tinsmith.rl.rewards.reward_model import RewardModel
from tinsmith.rl.scoring.pool import ScoringPool
from tinsmith.rl.types import Rollout, Task, Trajectory
from tinsmith.settings import Settings, build

__all__ = ["Reward", "RewardConfig", "Rewards", "make_reward"]

RewardConfig = Annotated[
    Number
    | Closeness
    | Marked
    | MathVerify
    | Math
    | MathBoxed
    | Countdown
    | Format
    | Overlong
    | ReasoningGymScore
    | CodeTests
    | Judge
    | RankJudge
    | RewardModel
    | ImplicitReward
    | CustomReward,
    Field(discriminator="type"),
]


def make_reward(settings: Mapping[str, Any]) -> Reward:
    """A reward function of its settings, as an entry of `rewards` in a run file. Raises ConfigError.

    Example: make_reward({"type": "number", "where": "boxed"})
    """
    return build(_OneReward, {"reward": dict(settings)}, "make_reward").reward


class _OneReward(Settings):
    reward: RewardConfig


class Rewards:
    """The reward functions of a run, by name. A run may have none."""

    def __init__(self, configs: Sequence[Reward], *, needed: bool = True, pool: ScoringPool | None = None) -> None:
        """Raise ConfigError if two rewards share a name. With `needed`, a rollout without any reward has failed.

        Comparisons that may take long are made in `pool`; without one, in this process.
        """
        self.needed, self.pool = needed, pool
        self._parts = {config.title: config for config in configs}
        if len(self._parts) < len(configs):
            raise ConfigError("rewards: two rewards have the same name.", "Set a different name: on each of them.")

    @property
    def configured(self) -> bool:
        """Whether the run has any reward function."""
        return bool(self._parts)

    def groups_score(self, role: str) -> bool:
        """Whether a reward compares the trajectories of this role in a group."""
        return any(config.of_group and config.role in ("", role) for config in self._parts.values())

    async def score(self, task: Task, trajectory: Trajectory, policy: Snapshot) -> Score:
        """The weighted sum, with each reward before its weight as a part; without rewards that compare a group.

        A reward that consists of named parts is recorded as NAME, their sum, and NAME/PART.
        """
        rollout, scores = Rollout(trajectories=(trajectory,)), dict[str, Score]()
        for name, config in self._parts.items():
            if config.role in ("", trajectory.role) and not config.of_group:
                scores[name] = await run_user_code(self._score_by(config, task, rollout, policy))
        return self._sum(scores)

    async def score_group(
        self, task: Task, trajectories: Sequence[Trajectory], policy: Snapshot, seed: int
    ) -> list[Score]:
        """As `score`, by the rewards that compare a group: for all its trajectories of one role. Raises ValueError
        for a reward that does not return one value for each."""
        rollouts = [Rollout(trajectories=(each,)) for each in trajectories]
        by_rollout: list[dict[str, Score]] = [{} for _ in rollouts]
        for name, config in self._parts.items():
            if config.of_group and config.role in ("", trajectories[0].role):
                values = list(await run_user_code(config.judge_group(task, rollouts, policy, seed)))
                if len(values) != len(rollouts):
                    raise ValueError(f"{name} returned {counted(len(values), 'value')} for {len(rollouts)} replies")
                for scores, value in zip(by_rollout, values, strict=True):
                    scores[name] = Score.of(value)
        return [self._sum(scores) for scores in by_rollout]

    def _sum(self, scores: Mapping[str, Score]) -> Score:
        total, parts = 0.0, dict[str, float]()
        for name, score in scores.items():
            parts |= {f"{name}/{part}": value for part, value in score.parts.items()}
            parts[name] = score.value
            total += self._parts[name].weight * score.value
        return Score(value=total, correct=all_correct(score.correct for score in scores.values()), parts=parts)

    async def _score_by(self, config: Reward, task: Task, rollout: Rollout, policy: Snapshot) -> Score:
        if isinstance(config, CustomReward) and config.isolated and self.pool is not None:
            return await config.judge_isolated(self.pool, task, rollout)
        return await score_by(config, task, rollout, policy, self.pool)
