"""Workflow, the base class of rLLM's workflows: a task in, an Episode out.

A workflow object serves one rollout at a time and is used again for later ones; `reset` clears its state. An Episode
that `run` returns is taken as it is. Without one, the committed trajectories and those of the workflow's agents are
collected, and `postprocess_episode` computes rewards, correctness and metrics.
"""

from __future__ import annotations

import asyncio
import traceback
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from copy import deepcopy
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import override

from tinsmith.errors import UserError
from tinsmith.integrations.rllm.agents import BaseAgent, BaseEnv
from tinsmith.integrations.rllm.records import Episode, TerminationEvent, TerminationReason, Trajectory
from tinsmith.integrations.rllm.training import RllmWorkflowOptions, check_arguments, imported
from tinsmith.rl.workflows.base import AdaptedWorkflow, WorkflowOptions

if TYPE_CHECKING:
    from tinsmith.integrations.rllm.engines.base import RolloutEngine
    from tinsmith.integrations.rllm.store import Store

T = TypeVar("T")


class Workflow(AdaptedWorkflow, ABC):
    """Base class of workflows. A subclass implements `run`."""

    @classmethod
    @override
    def workflow_options(cls, args: Mapping[str, Any]) -> WorkflowOptions:
        objects = imported(args)
        check_arguments(cls, objects)
        return RllmWorkflowOptions(workflow_class=cls, workflow_args=objects)

    def __init__(
        self,
        rollout_engine: RolloutEngine,
        executor: ThreadPoolExecutor | None = None,
        timeout: float = 1e6,
        gamma: float = 0.0,
        reward_bonus_coeff: float = 0.0,
        store: Store | None = None,
        **kwargs: Any,
    ) -> None:
        """`executor` runs functions that block; None: a thread of asyncio. `timeout` is in seconds."""
        if kwargs:
            raise UserError(
                f"{type(self).__name__} has no argument {next(iter(kwargs))!r}.",
                "Take it in __init__, or remove it from workflow_args.",
            )
        self.rollout_engine, self.executor, self.timeout = rollout_engine, executor, float(timeout)
        self.gamma, self.reward_bonus_coeff, self.store = gamma, reward_bonus_coeff, store
        self.uid: str = ""
        self.task: Any = None
        self._completed_trajectories: list[Trajectory] = []

    @abstractmethod
    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode | None:
        """Run a task. `uid` is TASK_ID:NUMBER of the rollout."""
        ...

    async def run_with_termination_handling(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
        """Run a task; a time-out, a TerminationEvent or an exception becomes the episode's termination reason.

        The error of an exception is in `info["error"]`.
        """
        self.uid, self.task, self._completed_trajectories = uid, task, []
        clock = asyncio.timeout(kwargs.pop("timeout", self.timeout))
        try:
            async with clock:
                output = await self.run(task, uid, **kwargs)
        except TerminationEvent as event:
            return self._postprocessed(event.reason)
        except Exception as error:  # noqa: BLE001  user code: the error is recorded with the rollout
            if isinstance(error, TimeoutError) and clock.expired():
                return self._postprocessed(TerminationReason.TIMEOUT)
            return self._postprocessed(TerminationReason.ERROR, error)
        if output is None:
            return self._postprocessed(TerminationReason.UNKNOWN)
        if isinstance(output, Episode):
            return output
        return self._postprocessed(
            TerminationReason.ERROR, TypeError(f"run returned a {type(output).__name__}, not an Episode or None")
        )

    def _postprocessed(self, reason: TerminationReason, error: Exception | None = None) -> Episode:
        """The collected episode; errors of the user's own methods do not hide `error`."""
        try:
            return self.postprocess_episode(self.collect_trajectories(), reason, error=_details(error))
        except Exception as failure:  # noqa: BLE001  user code, as above
            details = _details(error or failure)
            info = {"error": details}
            return Episode(id=self.uid, task=self.task, termination_reason=TerminationReason.ERROR, info=info)

    def reset(self, task: dict[str, Any] | None = None, uid: str | None = None) -> Any:
        """Clear the trajectories, and reset the agents and environments among the attributes."""
        self.task, self.uid, self._completed_trajectories = task, uid or "", []
        for agent in self._agents():
            agent.reset()
            agent.trajectory.task = task
        for environment in self._environments():
            environment.reset(task=task)

    def commit(
        self,
        name: str | None = None,
        agent: BaseAgent | None = None,
        trajectory: Trajectory | None = None,
        reset: bool = False,
    ) -> None:
        """Add a finished trajectory, of an agent or by itself, under `name` if that is given.

        `reset` resets the agent. A trajectory without steps is left out.
        """
        if (agent is None) == (trajectory is None):
            raise UserError("commit takes either an agent or a trajectory.", "Pass one of them.")
        committed = trajectory if trajectory is not None else agent.trajectory if agent is not None else Trajectory()
        if name:
            committed.name = name
        if committed.steps:
            self._completed_trajectories.append(deepcopy(committed))
        if agent is not None and reset:
            agent.reset()

    def collect_trajectories(self) -> Episode:
        """An episode of the committed trajectories, and of those of agents that are not committed."""
        committed = {trajectory.uid for trajectory in self._completed_trajectories}
        rest = [agent.trajectory for agent in self._agents()]
        rest = [deepcopy(trajectory) for trajectory in rest if trajectory.steps and trajectory.uid not in committed]
        return Episode(trajectories=[*self._completed_trajectories, *rest])

    def compute_trajectory_reward(self, trajectory: Trajectory) -> None:
        """Set the reward of a trajectory that has none: the sum of the rewards of its steps."""
        trajectory.reward = float(trajectory.total_reward)

    def adjust_step_rewards(self, trajectory: Trajectory) -> None:
        """Shape and discount the rewards of steps.

        First r_i += reward_bonus_coeff * (r_i - r_{i-1}); then, if gamma is above 0, each reward becomes the return
        r_i + gamma * r_{i+1} + …
        """
        raw = [step.reward or 0.0 for step in trajectory.steps]
        shaped = [
            raw[0],
            *(r + self.reward_bonus_coeff * (r - before) for before, r in pairwise(raw)),
        ]
        later = 0.0
        for step, reward in zip(reversed(trajectory.steps), reversed(shaped), strict=True):
            later = reward + self.gamma * later
            step.reward = later if self.gamma > 0 else reward

    def assign_episode_correctness(self, episode: Episode) -> None:
        """Set `is_correct`: whether the sum of the rewards is above 0."""
        episode.is_correct = sum(trajectory.total_reward for trajectory in episode.trajectories) > 0

    def collect_metrics(self, episode: Episode) -> None:
        """Set the metrics: NAME_acc, the mean reward of the trajectories with this name."""
        rewards: dict[str, list[float]] = defaultdict(list)
        for trajectory in episode.trajectories:
            rewards[trajectory.name].append(trajectory.total_reward)
        episode.metrics = {f"{name}_acc": sum(values) / len(values) for name, values in rewards.items()}

    def postprocess_episode(
        self,
        episode: Episode,
        termination_reason: TerminationReason | None = None,
        error: dict[str, Any] | None = None,
    ) -> Episode:
        """Fill in id, task, rewards, correctness, metrics and termination reason of a collected episode."""
        episode.id, episode.task = self.uid, self.task
        for trajectory in episode.trajectories:
            if trajectory.steps and not trajectory.steps[-1].chat_completions and not trajectory.steps[-1].response_ids:
                trajectory.steps.pop()  # an agent had begun it when the rollout ended
            self.compute_trajectory_reward(trajectory)
            if len(trajectory.steps) > 1:
                self.adjust_step_rewards(trajectory)
        self.assign_episode_correctness(episode)
        self.collect_metrics(episode)
        if error is not None:
            episode.info["error"] = error
        episode.termination_reason = termination_reason or TerminationReason.UNKNOWN
        return episode

    def is_multithread_safe(self) -> bool:
        """Whether several of these workflows may run at the same time: whether all environments may."""
        return all(environment.is_multithread_safe() for environment in self._environments())

    async def run_in_executor(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function that blocks in a thread."""
        return await asyncio.get_running_loop().run_in_executor(
            self.executor, partial(copy_context().run, fn, *args, **kwargs)
        )

    def _agents(self) -> list[BaseAgent]:
        return [value for value in vars(self).values() if isinstance(value, BaseAgent)]

    def _environments(self) -> list[BaseEnv]:
        return [value for value in vars(self).values() if isinstance(value, BaseEnv)]


def _details(error: Exception | None) -> dict[str, Any] | None:
    if error is None:
        return None
    text = "".join(traceback.format_exception(error))
    return {"error_message": str(error), "error_type": type(error).__name__, "traceback": text}
