"""Parts of a run that its configuration determines: its folder, its data, its sampling, its policy, its workflows."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from pathlib import Path

from rich.console import Console

from tinsmith.errors import ConfigError, UserError
from tinsmith.plurals import counted
from tinsmith.rl.config import RunConfig
from tinsmith.rl.data.demonstrations import check_pair
from tinsmith.rl.data.tasks import HeldOutTasks, TaskSampler, TasksConfig
from tinsmith.rl.environments.base import OpeningRun
from tinsmith.rl.environments.mixture import mixture_workflow, split_environments
from tinsmith.rl.evaluate import EvalConfig
from tinsmith.rl.policy.models import Models
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.rl.policy.trainer import Trainer
from tinsmith.rl.record.layout import Layout
from tinsmith.rl.record.metrics import is_partial
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.rollouts.filters import GroupFilters
from tinsmith.rl.rollouts.resources import RolloutResources
from tinsmith.rl.rollouts.sampler import SamplingPlan
from tinsmith.rl.run.folder import RunFolder
from tinsmith.rl.run.resume import TasksPerStep, check_adapter, state_of_checkpoint
from tinsmith.rl.run.state import State
from tinsmith.rl.types import Demonstration
from tinsmith.rl.workflows.base import Workflow, WorkflowContext

log = logging.getLogger(__name__)

Connect = Callable[[str, int], Awaitable[Trainer]]
"""Connects to the server: from a state path (empty: a new adapter) and its version to the policy."""


class RunData:
    """Reads the data when an attribute is first used. Raises ConfigError if it cannot be read."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    @cached_property
    def tasks(self) -> tuple[TaskSampler, HeldOutTasks]:
        """Sampler of training tasks, and the held-out tasks."""
        config = self._config
        return split_environments(
            config.all_environments, config.seed, config.groups_per_step, train=config.trains_on_tasks
        )

    @cached_property
    def demonstrations(self) -> Sequence[Sequence[Demonstration]]:
        """Demonstrations of each source; none without settings for them."""
        demonstrations = self._config.demonstrations
        loaded = demonstrations.load() if demonstrations is not None else ()
        for part in loaded:
            check_pair(part[0], self._config.algorithm.learns_from == "pairs", self._config.algorithm.reads_labels)
        return loaded


def resolve_steps(config: RunConfig, data: RunData) -> RunConfig:
    """The configuration with `epochs` as steps: floor(rows x epochs / rows per step), at most `steps` if that is set.

    Rows that do not fill a last step are not trained on. Without `epochs`, in mode bench, or without tasks (mode train
    may have none), the configuration is returned as it is.
    """
    if config.epochs is None or config.mode == "bench" or (config.uses_rollouts and not config.trained):
        return config
    rows, per_step, key = _count_rows(config, data), config.groups_per_step, "groups_per_step"
    if config.demonstrations is not None and not config.uses_rollouts:
        per_step, key = config.demonstrations.count(per_step, config.group_size, alone=True), "demonstrations.per_step"
    steps = int(rows * config.epochs // per_step)
    if not steps:
        raise ConfigError(
            f"{counted(config.epochs, 'epoch')} of {rows} make less than one step of {per_step}.", f"Set {key} lower."
        )
    return config.model_copy(update={"steps": min(steps, config.steps or steps)})


def _count_rows(config: RunConfig, data: RunData) -> int:
    if config.demonstrations is None or config.uses_rollouts:
        return data.tasks[0].size
    return sum(map(len, data.demonstrations))


def image_field(config: RunConfig) -> str:
    """The field with the images of the run's tasks; empty if no source names one."""
    parts = (each.image_field for each in config.all_environments if isinstance(each, TasksConfig))
    return next(filter(None, parts), "")


async def check_images(data: RunData, models: Models) -> None:
    """Raise ConfigError, and close the session, if tasks have images that the model does not take: every rollout would
    fail. Looks at the first task of each source, because tasks are read when they are drawn."""
    sampler, held_out = data.tasks
    if models.chat.takes_images:
        return
    for task in [*sampler.examples, *(tasks[0] for tasks in held_out.values() if tasks)]:
        if any(message.images for message in task.messages):
            await models.close()
            refusal = models.chat.image_refusal
            raise ConfigError(f"The task {task.id} has images. {refusal.message}", refusal.hint)


async def open_environments(config: RunConfig, policy: Trainer | None, resources: RolloutResources) -> None:
    """Let the environments open what their rollouts use. `policy`: the policy in training, if this process trains."""
    staleness = config.staleness if config.sync.style == "fixed" else None
    run = OpeningRun(policy=policy, sections=config.sections, staleness=staleness, resources=resources.opened)
    for environment in config.all_environments:
        await environment.open(run)


def training_workflow(config: RunConfig, resources: RolloutResources) -> Workflow:
    """The workflow that samples training rollouts."""
    needed = config.algorithm.advantage.reads_rewards
    context = _context(config.sampling, resources, needs_rewards=needed, evaluating=False)
    return mixture_workflow(config.trained, config.sampling, context)


def eval_workflow_maker(config: RunConfig, resources: RolloutResources) -> Callable[[str, EvalConfig], Workflow]:
    """A function from the name of a source of held-out tasks and its settings to its workflow."""
    environments = config.evaluated

    def make(name: str, settings: EvalConfig) -> Workflow:
        environment = environments[name]
        sampling = settings.sampling(environment.sampling_of(config.sampling))
        return environment.make(_context(sampling, resources, needs_rewards=True, evaluating=True))

    return make


def eval_context(config: RunConfig, resources: RolloutResources) -> WorkflowContext:
    """The context of functions that evaluate the policy."""
    return _context(config.eval.sampling(config.sampling), resources, needs_rewards=False, evaluating=True)


def _context(
    sampling: SamplingConfig, resources: RolloutResources, *, needs_rewards: bool, evaluating: bool
) -> WorkflowContext:
    return WorkflowContext(
        sampling=sampling,
        rewards=Rewards((), needed=needs_rewards, pool=resources.scoring),
        agent_endpoint=resources.agent_endpoint,
        store=resources.store,
        evaluating=evaluating,
        resources=resources.opened,
    )


async def connect_policy(config: RunConfig, folder: RunFolder, connect: Connect, console: Console) -> Trainer:
    """The policy at the state that the run continues from; `folder.state` is that state after `resume_from`.

    Raises ConfigError if the server has no checkpoint that fits the run; nothing in the folder has changed then.
    """
    state, source = folder.state, config.resume_from
    if not source or (state is not None and not folder.goes_back):
        if source and state is not None and state.origin:
            text = (
                f"resume_from: this run has continued from {state.origin} before; its newest state is step {state.step}"
            )
            console.print(text, highlight=False, markup=False, soft_wrap=True)
        return await connect(state.path if state else "", state.version if state else 0)
    path = state.path if state else source
    try:
        policy = await connect(path, state.version if state else 0)
    except ConfigError:  # no server
        raise
    except UserError as error:
        raise ConfigError(
            f"resume_from: {error.message}", "Name a checkpoint that is on the server of this run, under the same key."
        ) from error
    try:
        info = await policy.models.checkpoint_info(path)
        check_adapter(info, path, config.model)
        exactness = "exact, by its state file"
        if state is None:
            state, exactness = state_of_checkpoint(info, path, _drawn_per_step(config), config.seed)
        _check_continues(config, state)
        policy.set_version(state.version)
        folder.start_at(state)
    except BaseException:
        await policy.models.close()
        raise
    text = f"resume_from: step {state.step}, {path}: {exactness}"
    log.info("%s", text)
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    return policy


def _drawn_per_step(config: RunConfig) -> TasksPerStep:
    demonstrations = config.demonstrations
    alone = not config.uses_rollouts
    return TasksPerStep(
        tasks=0 if alone else config.groups_per_step,
        demonstrations=demonstrations.count(config.groups_per_step, config.group_size, alone=alone)
        if demonstrations
        else 0,
    )


def _check_continues(config: RunConfig, state: State) -> None:
    """Raise ConfigError if the run has no step after `state`, or needs what `state` lacks."""
    if state.step >= config.steps:
        raise ConfigError(
            f"resume_from: {state.path} is of step {state.step}, and the run has {counted(config.steps, 'step')}.",
            "Set steps higher, or name an earlier checkpoint.",
        )
    lacking = "the critic" if config.algorithm.critic is not None and not state.critic_path else ""
    if config.algorithm.reference == "start" and not state.reference:
        lacking = "the reference model"
    if lacking:
        raise ConfigError(
            f"resume_from: nothing says which checkpoint has {lacking} of {state.path}.",
            "Name its state file FOLDER/checkpoints/step-000010.json.",
        )


def sampling_plan(config: RunConfig, filters: GroupFilters) -> SamplingPlan:
    """The sampling plan. With sync.style fixed, step t uses batch t; else sampling runs as long as training."""
    waiting = config.buffer
    one_each = config.sync.style == "fixed" and not waiting.replay.enable and waiting.max_staleness is None
    return SamplingPlan(
        steps=config.steps if one_each else None,
        groups=config.groups_per_step,
        size=config.group_size,
        staleness=config.staleness,
        seed=config.seed,
        sync=config.sync,
        capacity=config.buffer.capacity,
        filters=filters,
        recomputes=config.algorithm.recomputes,
        filter_refills=config.filter_refills,
        min_partial=config.min_partial_groups,
        is_partial=lambda group: is_partial(group, config.eval.threshold),
    )


def with_fresh_folder(config: RunConfig, part: str = "") -> RunConfig:
    """With `resume: rename` and a run in the folder, the configuration with the new folder FOLDER_YYYYmmddHHMMSS.

    The commands and the Python API apply it once, before they start the run. `part`: look for this part of a run, such
    as `bench`, in place of a training run.
    """
    folder = folder_path(config)
    if config.resume != "rename" or not Layout(folder).part(part).settings.exists():
        return config
    return config.model_copy(update={"folder": f"{folder}_{time.strftime('%Y%m%d%H%M%S')}"})


def folder_path(config: RunConfig) -> Path:
    """Path of the run folder."""
    return Path(config.folder or f"runs/{config.name}").expanduser()
