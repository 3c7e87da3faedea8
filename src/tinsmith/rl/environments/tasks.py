"""The environment `tasks`: tasks, workflow and rewards, as a run without environments has them at the top level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import model_validator
from typing_extensions import override

from tinsmith.rl.data.tasks import HeldOutTasks, TaskSampler, TasksConfig, split, training_tasks
from tinsmith.rl.environments.base import EnvironmentOptions
from tinsmith.rl.rewards import Reward, RewardConfig, Rewards
from tinsmith.rl.types import Task
from tinsmith.rl.workflows import WorkflowConfig
from tinsmith.rl.workflows.base import Workflow, WorkflowContext, WorkflowOptions
from tinsmith.rl.workflows.group_scoring import GroupScoredWorkflow
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

    @property
    @override
    def group_rewards(self) -> tuple[str, ...]:
        return tuple(reward.title for reward in self.rewards if reward.of_group)

    @override
    def tasks(self) -> Sequence[Task]:
        return training_tasks(self)

    @override
    def held_out_tasks(self) -> Sequence[Task] | None:
        return None if self.eval is None else split(self.model_copy(update={"train": None}), 0)[1][""]

    @override
    def evaluated_with(self, workflow: WorkflowOptions | None, rewards: Sequence[Reward]) -> EnvironmentOptions:
        own = tuple(reward for reward in self.rewards if not reward.of_group)
        return self.model_copy(update={"workflow": workflow or self.workflow, "rewards": rewards or own})

    @override
    def split(self, seed: int, *, train: bool) -> tuple[TaskSampler | None, tuple[Task, ...]]:
        sampler, held_out = self.split_by_source(seed, train=train)
        return sampler, held_out.get("", ())

    @override
    def split_by_source(self, seed: int, *, train: bool) -> tuple[TaskSampler | None, HeldOutTasks]:
        splits_training_tasks = train or self.eval is None
        sampler, held_out = split(self if splits_training_tasks else self.model_copy(update={"train": None}), seed)
        return sampler if train else None, held_out

    @override
    def make(self, context: WorkflowContext) -> Workflow:
        rewards = Rewards(self.rewards, needed=context.rewards.needed, pool=context.rewards.pool)
        workflow = self.workflow.make(replace(context, rewards=rewards))
        return GroupScoredWorkflow(workflow, rewards) if self.group_rewards else workflow


class TopLevelEnvironment(TasksEnvironment):
    """The top-level `tasks`, `workflow` and `rewards` of a run file, which are an environment without a name."""

    @property
    @override
    def title(self) -> str:
        return ""

    @property
    @override
    def held_out_sources(self) -> tuple[str, ...]:
        return tuple(self.eval) if isinstance(self.eval, dict) else super().held_out_sources

    @classmethod
    def of(cls, tasks: TasksConfig, workflow: WorkflowOptions, rewards: Sequence[Reward]) -> TopLevelEnvironment:
        """The environment of these keys of a run file; without training tasks it is only evaluated."""
        weight = 1.0 if tasks.sources else 0.0
        return cls.model_construct(**dict(tasks), workflow=workflow, rewards=rewards, weight=weight)
