"""The environment `tasks`: tasks, workflow and rewards, as a run without environments has them at the top level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import model_validator
from typing_extensions import override

from tinsmith.rl.data.tasks import TaskSampler, TasksConfig, split, training_tasks
from tinsmith.rl.environments.base import EnvironmentOptions
from tinsmith.rl.rewards import RewardConfig, Rewards
from tinsmith.rl.types import Task
from tinsmith.rl.workflows import WorkflowConfig
from tinsmith.rl.workflows.base import Workflow, WorkflowContext
from tinsmith.rl.workflows.single_turn import SingleTurnConfig


class TasksEnvironment(TasksConfig, EnvironmentOptions):
    """Tasks of sources, with a workflow and rewards: the keys of `tasks`, `workflow` and `rewards` of a run."""

    type: Literal["tasks"] = "tasks"
    workflow: WorkflowConfig = SingleTurnConfig()
    """Workflow of the rollouts."""
    rewards: tuple[RewardConfig, ...] = ()
    """Reward functions. The reward is their weighted sum plus the workflow's own reward."""

    @model_validator(mode="after")
    def _check_sources(self) -> TasksEnvironment:
        if isinstance(self.eval, dict):
            raise ValueError(
                "eval takes a single source in an environment; make an environment with weight 0 of each further one"
            )
        if self.weight and not self.sources:
            raise ValueError(
                "train is missing; set train, or set weight to 0 for an environment that is only evaluated"
            )
        return self

    @property
    @override
    def provides_rewards(self) -> bool:
        return bool(self.rewards) or self.workflow.provides_rewards

    @property
    @override
    def provides_states(self) -> bool:
        return self.workflow.provides_states

    @property
    @override
    def says_correct(self) -> bool:
        return any(reward.says_correct for reward in self.rewards)

    @override
    def tasks(self) -> Sequence[Task]:
        return training_tasks(self)

    @override
    def held_out_tasks(self) -> Sequence[Task] | None:
        return None if self.eval is None else split(self.model_copy(update={"train": None}), 0)[1][""]

    @override
    def split(self, seed: int, *, train: bool) -> tuple[TaskSampler | None, tuple[Task, ...]]:
        if not train and (held_out := self.held_out_tasks()) is not None:
            return None, tuple(held_out)
        sampler, held_out = split(self, seed)
        return sampler if train else None, held_out.get("", ())

    @override
    def make(self, context: WorkflowContext) -> Workflow:
        rewards = Rewards(self.rewards, needed=context.rewards.needed, pool=context.rewards.pool)
        return self.workflow.make(replace(context, rewards=rewards))
