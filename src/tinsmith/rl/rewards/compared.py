"""The bases of rewards that are computed in a worker process, because they may take long or hang."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field
from typing_extensions import override

from tinsmith.imports import import_object
from tinsmith.processes.time_limit import call_with_limit
from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.rewards.base import Reward, Score
from tinsmith.rl.scoring.pool import ScoringPool
from tinsmith.rl.types import Rollout, Task


@dataclass(frozen=True, slots=True)
class Comparison:
    """A function of `tinsmith.rl.scoring`, by name, and its arguments.

    Example: Comparison("tinsmith.rl.scoring.mathematics:compare", ("1/2", "$0.5$"))
    """

    function: str
    arguments: tuple[Any, ...]

    def run(self, seconds: float) -> Any:
        """The result, computed in this process. Raises TimeoutError after `seconds`, in the main thread only."""
        return call_with_limit(import_object(self.function), self.arguments, seconds)


class PooledReward(Reward):
    """Base of rewards that a run computes in a worker process, and anyone else by `score` in this process."""

    async def judge_in(self, pool: ScoringPool, task: Task, rollout: Rollout) -> Score:
        """The score of the last reply of a rollout. Raises ComparisonError if the process fails."""
        raise NotImplementedError


class ComparedReward(PooledReward):
    """Base of rewards whose comparison a run makes in a worker process, with a time limit.

    `score` makes it in this process, where the limit applies in the main thread only and not to long operations in C.
    """

    wrong: ClassVar[Any] = None
    """Result for a reply without an answer to compare, or whose comparison takes longer than `timeout`."""
    timeout: int = Field(default=5, ge=1)
    """Time limit of a comparison, in seconds. A reply whose comparison takes longer is wrong."""

    @property
    @override
    def says_correct(self) -> bool:
        return True

    @override
    def read_answer(self, task: Task, text: str) -> str:
        comparison = self.comparison(task, text)
        read = comparison.arguments[-1] if comparison else ""
        return read if isinstance(read, str) else ""

    def comparison(self, task: Task, text: str) -> Comparison | None:
        """The comparison of a reply; None if the reply has no answer to compare."""
        raise NotImplementedError

    def grade(self, task: Task, text: str, result: Any) -> Score:
        """The score of a reply, given the result of its comparison."""
        raise NotImplementedError

    @override
    def score(self, task: Task, text: str) -> Score:
        comparison, result = self.comparison(task, text), self.wrong
        if comparison is not None:
            with suppress(TimeoutError):
                result = comparison.run(self.timeout)
        return self.grade(task, text, result)

    @override
    async def judge_in(self, pool: ScoringPool, task: Task, rollout: Rollout) -> Score:
        text, result = rollout.text, self.wrong
        comparison = self.comparison(task, text)
        if comparison is not None:
            with suppress(TimeoutError):
                result = await pool.call(comparison.function, *comparison.arguments, seconds=self.timeout)
        return self.grade(task, text, result)


async def score_by(reward: Reward, task: Task, rollout: Rollout, policy: Snapshot, pool: ScoringPool | None) -> Score:
    """The score of a rollout by a reward. Without a pool, it is computed in this process.

    Raises ValueError for a reward that compares the replies of a group.
    """
    if reward.of_group:
        raise ValueError(
            f"the reward {reward.title} compares the replies of a group; list it in rewards of the run file"
        )
    if isinstance(reward, PooledReward) and pool is not None:
        return await reward.judge_in(pool, task, rollout)
    return Score.of(await reward.judge(task, rollout, policy))
