"""EnvironmentOptions, the base class of environments: tasks, how the policy works on them, and what they are worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, ValidationError, field_validator
from typing_extensions import override

from tinsmith.errors import ConfigError
from tinsmith.plurals import counted
from tinsmith.rl.data.ordering import LoadedSource, OrderConfig, Shuffle
from tinsmith.rl.data.tasks import (
    DEFAULT_HELD_OUT,
    HeldOutTasks,
    TaskSampler,
    count_held_out,
    hold_out,
    task_sampler,
)
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.rl.policy.trainer import Trainer
from tinsmith.rl.rewards import Reward
from tinsmith.rl.rollouts.resources import Resource
from tinsmith.rl.types import Task
from tinsmith.rl.workflows.base import WorkflowOptions
from tinsmith.settings import Settings, did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class OpeningRun:
    """The run in which an environment opens its resources."""

    policy: Trainer | None
    """The policy in training; None in modes explore and bench, where it is in another process or nowhere."""
    sections: Mapping[str, Settings]
    """Sections of the run file that environments share, by key."""
    staleness: int | None
    """Largest number of versions that rollouts may be older than the policy; None: it is not known."""
    resources: dict[str, Resource]
    """What environments have opened so far, by name. What is added here is closed as the run ends."""


_SPLIT_SEED = 0
"""Seed of the split of held-out tasks: runs with different seeds share them."""


class EnvironmentOptions(WorkflowOptions):
    """Base class of environments: a workflow with its tasks. A subclass implements `tasks` and `rollout`; its fields
    are settings of the run file.

    Example:

        @environment("parity")
        class Parity(EnvironmentOptions):
            digits: int = 6

            def tasks(self) -> Sequence[Task]:
                return [parity_task(number) for number in range(10**self.digits)]

            async def rollout(self, task: Task, policy: WorkflowPolicy, seed: int) -> float:
                reply = await policy.conversation().say(*task.messages)
                return float(reply.text.strip() == task.answer)
    """

    has_tasks: ClassVar[bool] = True
    sections: ClassVar[Mapping[str, type[Settings]]] = {}
    """Sections of the run file that environments of the class share, by key, such as `shadow`."""
    needs_policy: ClassVar[bool] = False
    """Whether `open` uses the policy in training, which there is not in modes explore and bench."""

    name: str = ""
    """Name of the environment, in metrics and messages. Empty: its type or id."""
    weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Share of the groups of a step, relative to the weights of the other environments; 0: only evaluated."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Keys of `sampling` that differ from those of the run, such as {max_tokens: 64}."""
    held_out: int | None = Field(default=None, ge=0)
    """Number of tasks that are held out for evaluation; 0: none. null: 100; of fewer than 1,000 tasks that
    are trained on too, a tenth, rounded up."""

    @field_validator("sampling")
    @classmethod
    def _check_sampling_keys(cls, sampling: dict[str, Any]) -> dict[str, Any]:
        _check_keys(sampling)
        return sampling

    @property
    def resolved(self) -> EnvironmentOptions:
        """The environment of this entry of a run file."""
        return self

    @property
    def title(self) -> str:
        """The name of the environment; empty for the top-level tasks of a run file."""
        kind = type(self).model_fields.get("type")
        return self.name or (str(kind.default) if kind else type(self).__name__)

    @property
    def evaluates(self) -> bool:
        """Whether the environment has held-out tasks."""
        return self.held_out != 0

    @property
    def held_out_sources(self) -> tuple[str, ...]:
        """Names of the sets of held-out tasks; a single set has none."""
        return ("",) if self.evaluates else ()

    @property
    def most_held_out(self) -> int:
        """Largest number of held-out tasks."""
        return DEFAULT_HELD_OUT if self.held_out is None else self.held_out

    @property
    @override
    def provides_rewards(self) -> bool:
        return True

    @property
    @override
    def provides_states(self) -> bool:
        return False

    @property
    def says_correct(self) -> bool:
        """Whether each rollout says if it is right, so that eval.threshold has no effect."""
        return False

    @property
    def group_rewards(self) -> tuple[str, ...]:
        """Titles of the rewards that compare the rollouts of a group."""
        return ()

    def tasks(self) -> Sequence[Task]:
        """All tasks, the same in every run. A sequence that makes its items on access loads only the tasks used."""
        raise NotImplementedError

    def held_out_tasks(self) -> Sequence[Task] | None:
        """Tasks of an evaluation that are not among `tasks`; None: `held_out` of `tasks` are held out."""
        return None

    def task_order(self) -> OrderConfig:
        """Order of the training tasks."""
        return Shuffle()

    async def open(self, run: OpeningRun) -> None:
        """Open what the rollouts use and add it to `run.resources`, once in a run; a rollout finds it in
        `policy.context.resources`."""

    def evaluated_with(self, workflow: WorkflowOptions | None, rewards: Sequence[Reward]) -> EnvironmentOptions:
        """The environment with the workflow and the rewards of an evaluation, which only type `tasks` may have; without
        rewards of its own that compare a group."""
        return self

    def split(self, seed: int, *, train: bool) -> tuple[TaskSampler | None, tuple[Task, ...]]:
        """Sampler of training tasks (None unless `train`), and the held-out tasks. Raises ConfigError without a task
        to train on."""
        own = self.held_out_tasks()
        if own is not None and not train:
            return None, tuple(own[: self.most_held_out])
        tasks = [LoadedSource(self.tasks(), _no_feature)]
        total = len(tasks[0].tasks)
        count = count_held_out(self.held_out, total) if self.weight else self.most_held_out
        split, rows = hold_out(tasks, count if own is None else 0, _SPLIT_SEED)
        held_out = tuple((split if own is None else own)[: self.most_held_out])
        if not train:
            return None, held_out
        if not len(rows):
            raise ConfigError(
                f"environment {self.title} has {counted(total, 'task')}; {self.held_out} held out leave none to "
                "train on.",
                "Set its held_out lower.",
            )
        return task_sampler(tasks, rows, self.task_order(), {"": held_out}, seed), held_out

    def split_by_source(self, seed: int, *, train: bool) -> tuple[TaskSampler | None, HeldOutTasks]:
        """As `split`, with the held-out tasks by the names of `held_out_sources`."""
        sampler, held_out = self.split(seed, train=train)
        return sampler, {"": held_out}

    def sampling_of(self, run: SamplingConfig) -> SamplingConfig:
        """Sampling settings of the environment, given those of the run."""
        return SamplingConfig.model_validate({**dict(run), **self.sampling})


def _no_feature(key: str) -> np.ndarray:
    raise ConfigError(f"The tasks of an environment have no field {key!r}.", "Use type: tasks with a source of rows.")


def _check_keys(sampling: Mapping[str, Any]) -> None:
    """Raises ValueError for a key that SamplingConfig does not have, or a value that it does not take."""
    names = SamplingConfig.model_fields
    if unknown := [key for key in sampling if key not in names]:
        hint = did_you_mean(unknown[0], names) or f"Known here: {', '.join(names)}."
        raise ValueError(f"there is no key '{unknown[0]}' in sampling. {hint.rstrip('.')}")
    try:
        SamplingConfig.model_validate(dict(sampling))
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        raise ValueError(f"{key}: {fault['msg'].removeprefix('Value error, ')}") from error
