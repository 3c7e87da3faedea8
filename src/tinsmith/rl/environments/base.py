"""EnvironmentOptions, the base class of environments: tasks, how the policy works on them, and what they are worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, ValidationError, field_validator

from tinsmith.errors import ConfigError
from tinsmith.plurals import counted
from tinsmith.rl.data.ordering import OrderConfig, Shuffle
from tinsmith.rl.data.tasks import (
    DEFAULT_HELD_OUT,
    SampledSource,
    SourceSampler,
    TaskSampler,
    count_held_out,
    split_rows,
)
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.rl.types import Task
from tinsmith.rl.workflows.base import Workflow, WorkflowContext
from tinsmith.settings import Settings, did_you_mean

_SPLIT_SEED = 0
"""Seed of the split of held-out tasks: runs with different seeds share them."""


class EnvironmentOptions(Settings):
    """Base class of environments. A subclass implements `tasks` and `make`; its fields are settings of the run file.

    Example:

        @environment("parity")
        class Parity(EnvironmentOptions):
            digits: int = 6

            def tasks(self) -> Sequence[Task]:
                return [parity_task(number) for number in range(10**self.digits)]

            def make(self, context: WorkflowContext) -> Workflow:
                return ParityWorkflow(context.sampling)
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    """Services of the run that environments of the class use, such as `shadow`."""

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
    def title(self) -> str:
        """The name of the environment."""
        kind = type(self).model_fields.get("type")
        return self.name or (str(kind.default) if kind else type(self).__name__)

    @property
    def services(self) -> frozenset[str]:
        """Services of the run that the environment uses."""
        return self.needs

    @property
    def evaluates(self) -> bool:
        """Whether the environment has held-out tasks."""
        return self.held_out != 0

    @property
    def most_held_out(self) -> int:
        """Largest number of held-out tasks."""
        return DEFAULT_HELD_OUT if self.held_out is None else self.held_out

    @property
    def provides_rewards(self) -> bool:
        """Whether rollouts have a reward."""
        return True

    @property
    def provides_states(self) -> bool:
        """Whether turns may have states, which some advantages compare."""
        return False

    @property
    def says_correct(self) -> bool:
        """Whether each rollout says if it is right, so that eval.threshold has no effect."""
        return False

    def tasks(self) -> Sequence[Task]:
        """All tasks, the same in every run. A sequence that makes its items on access loads only the tasks used."""
        raise NotImplementedError

    def held_out_tasks(self) -> Sequence[Task] | None:
        """Tasks of an evaluation that are not among `tasks`; None: `held_out` of `tasks` are held out."""
        return None

    def task_order(self) -> OrderConfig:
        """Order of the training tasks."""
        return Shuffle()

    def make(self, context: WorkflowContext) -> Workflow:
        """Create the workflow of the tasks, which gives the rewards too; `context` has the environment's sampling."""
        raise NotImplementedError

    def split(self, seed: int, *, train: bool) -> tuple[TaskSampler | None, tuple[Task, ...]]:
        """Sampler of training tasks (None unless `train`), and the held-out tasks. Raises ConfigError without a task
        to train on."""
        held_out = self.held_out_tasks()
        if not train and held_out is not None:
            return None, tuple(held_out[: self.most_held_out])
        tasks = self.tasks()
        rows = np.arange(len(tasks))
        if held_out is None:
            count = count_held_out(self.held_out, len(tasks)) if self.weight else self.most_held_out
            held_rows, rows = split_rows(len(tasks), count, _SPLIT_SEED)
            held_out = [tasks[int(row)] for row in held_rows]
        held_out = tuple(held_out[: self.most_held_out])
        if not train:
            return None, held_out
        if not len(rows):
            raise ConfigError(
                f"environment {self.title} has {counted(len(tasks), 'task')}; {self.held_out} held out leave none to "
                "train on.",
                "Set its held_out lower.",
            )
        order = self.task_order().row_order(rows, _no_feature, (seed,))
        return SourceSampler([SampledSource(tasks, order, len(rows))], {"": held_out}, seed), held_out

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
