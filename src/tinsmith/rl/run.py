"""A run in progress: its parts, and the methods that the training loop calls in each step.

`train.assemble` creates the parts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from tinsmith.errors import ConfigError, UserError
from tinsmith.rl import metrics
from tinsmith.rl.algorithms.algorithm import Algorithm
from tinsmith.rl.algorithms.critic import Critic
from tinsmith.rl.config import RunConfig
from tinsmith.rl.data.demonstrations import Demonstrations
from tinsmith.rl.data.tasks import TaskSampler
from tinsmith.rl.evaluate import Evaluator
from tinsmith.rl.monitors.base import Monitors
from tinsmith.rl.policy.base import Policy, Update
from tinsmith.rl.policy.request_limit import TokenRates
from tinsmith.rl.policy.training_rows import TrainingRow
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.rollouts.batch_source import BatchSource
from tinsmith.rl.rollouts.filters import apply_filters
from tinsmith.rl.rollouts.producer import Batch
from tinsmith.rl.run_folder import SETTINGS, RandomStates, RunFolder, State, check_adapter, state_of_checkpoint
from tinsmith.rl.run_folder.resume_from import TasksPerStep
from tinsmith.rl.run_folder.state import as_metadata, json_values
from tinsmith.rl.types import Group

log = logging.getLogger(__name__)

Connect = Callable[[str, int], Awaitable[Policy]]
"""Connects to the server: from a state path (empty: a new adapter) and its version to the policy."""


class StepTimer:
    """Wall-clock seconds of the parts of a step."""

    def __init__(self) -> None:
        self._begin = self._last = time.perf_counter()
        self.parts: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """Record the time since the last call as that of `part`."""
        now = time.perf_counter()
        self.parts[f"time/{part}"] = now - self._last
        self._last = now

    def total(self) -> float:
        """Seconds since the timer was created."""
        return time.perf_counter() - self._begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The parts of a run, and what the loop does with them. All parts live as long as the run."""

    config: RunConfig
    folder: RunFolder
    policy: Policy
    task_sampler: TaskSampler
    batches: BatchSource
    algorithm: Algorithm
    evaluator: Evaluator
    rewards: Rewards | None
    """Reward functions of the evaluation, if there are held-out tasks."""
    monitors: Monitors
    reference: str
    """Name or tinker:// path of the model that divergences are measured from."""
    critic: Critic | None
    demonstrations: Demonstrations | None
    store: dict[str, Any]
    """Values that all rollouts share, which workflows read and write."""
    rates: TokenRates

    def steps(self) -> range:
        """The remaining steps, counted from 1."""
        done = self.folder.state.step if self.folder.state else 0
        return range(done + 1, self.config.steps + 1)

    async def evaluate_before_training(self) -> None:
        """Evaluate the initial weights, and the score of the best constant answer."""
        if self.folder.state is None and self.evaluator.due(0, self.config.steps):
            baseline: dict[str, float] = {}
            if self.rewards is not None:
                baseline = await self.evaluator.baseline(self.rewards, await self.policy.snapshot())
            await self._evaluate(0, baseline)

    def filtered_groups(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """The groups that pass the filters; with filter_refills, at most groups_per_step, or all of a search for groups
        solved in part."""
        passed = apply_filters(self.config.filters, groups)
        cut = self.config.filter_refills and not self.config.min_partial_groups
        return passed[: self.config.groups_per_step] if cut else passed

    def next_demonstrations(self) -> list[TrainingRow]:
        """The rows of demonstrations for one step."""
        if self.demonstrations is None or self.config.demonstrations is None:
            return []
        alone = not self.config.uses_rollouts
        count = self.config.demonstrations.count(self.config.groups_per_step, self.config.group_size, alone=alone)
        return self.demonstrations.draw(count)

    async def update(self, step: int, update: Update) -> dict[str, float]:
        """Apply the update unless it has no rows; returns its metrics."""
        rate = self.config.optimizer.learning_rate_at(step, self.config.steps)
        if not update.rows:
            return {"optim/skipped": 1.0, "optim/lr": rate, **update.numbers}
        critic_metrics: dict[str, float] = {}
        if self.critic is not None:
            critic_metrics = await self.critic.learn(step, update.rows)
            if step <= self.critic.config.warmup_steps:
                return {"optim/skipped": 1.0, "optim/lr": rate, **update.numbers, **critic_metrics}
        updated = await self.policy.update(update, self.config.optimizer, rate)
        measured = update.measure(updated.logprobs) if update.measure else {}
        coefficients = self.algorithm.adapt_coefficients(update, updated)
        return {
            **metrics.update_metrics(update.rows, updated, measured),
            "optim/lr": rate,
            **update.numbers,
            **coefficients,
            **critic_metrics,
        }

    def log(
        self, step: int, batch: Batch, trained_groups: int, version: int, numbers: Mapping[str, float], timer: StepTimer
    ) -> None:
        """Report a step to the task order, the monitors and the log.

        `trained_groups`: groups that passed the filters; `version`: of the weights before the update.
        """
        self.task_sampler.update(batch.groups)
        sampled = metrics.group_metrics(batch.groups, version) if batch.groups else {}
        seconds = timer.total()
        speed = {**self.rates.lap(numbers.get("tokens/trained", 0.0)), "time/step": seconds}
        if batch.groups:
            self.monitors.rollouts(step, "train", batch.groups)
        if self.config.filters and batch.groups:
            sampled["filters/dropped"] = 1.0 - trained_groups / len(batch.groups)
        self.monitors.metrics(step, {**sampled, **batch.numbers, **numbers, **speed, **timer.parts})
        reward = sampled.get("reward/mean", float("nan"))
        log.info("Step %d of %d: reward %.4g, %.2f seconds", step, self.config.steps, reward, seconds)
        if failed := [rollout.error for group in batch.groups for rollout in group.rollouts if rollout.error]:
            log.warning("%d rollouts of step %d failed; the first: %s", len(failed), step, failed[0])

    async def save_and_evaluate(self, step: int) -> None:
        """Evaluate and save if due after `step`. The state is written last, after all files of the step."""
        last = step == self.config.steps
        if self.evaluator.due(step, self.config.steps):
            await self._evaluate(step, {})
        every = self.config.checkpoint.every
        if last or (every and step % every == 0):
            await self._save(step, last)

    async def _evaluate(self, step: int, baseline: Mapping[str, float]) -> None:
        timer = StepTimer()
        groups, values = await self.evaluator.run(step, await self.policy.snapshot())
        self.monitors.rollouts(step, "eval", groups)
        self.monitors.metrics(step, {**values, **baseline, "time/eval": timer.total()})

    async def _save(self, step: int, last: bool) -> None:
        batch_state = await self.batches.capture_state()
        name = "final" if last else f"step-{step:06}"
        ttl = None if last else self.config.checkpoint.ttl_seconds
        critic_path = await self.critic.save(f"critic-{name}", ttl) if self.critic else ""
        before = self.folder.state
        state = State(
            step=step,
            version=self.policy.version,
            path="",
            cursor=self.task_sampler.cursor,
            order=self.task_sampler.state,
            demonstrations_drawn=self.demonstrations.cursor if self.demonstrations else 0,
            random=RandomStates.capture(),
            batches=batch_state,
            algorithm=dict(self.algorithm.state),
            reference=self.reference,
            critic_path=critic_path,
            store=json_values(self.store),
            origin=before.origin if before else "",
        )
        path = await self.policy.save(name, ttl, as_metadata(state, self.config.seed))
        sampling_path = await self.policy.save_for_sampling(name) if last else ""
        new = (path, critic_path) if critic_path else (path,)
        others = (paths for paths in (before.checkpoints if before else ()) if paths[0] != path)
        dropped, checkpoints = self.config.checkpoint.cut((*others, new))
        saved = {"path": path, "sampling_path": sampling_path, "checkpoints": checkpoints}
        self.folder.save(state.model_copy(update=saved))
        for paths in dropped:
            for deleted in paths:
                await self.policy.delete_checkpoint(deleted)
        self.folder.forget(dropped)
        await self.batches.state_saved()


async def connect_policy(config: RunConfig, folder: RunFolder, connect: Connect, console: Console) -> Policy:
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
        info = await policy.checkpoint_info(path)
        check_adapter(info, path, config.model)
        exactness = "exact, by its state file"
        if state is None:
            state, exactness = state_of_checkpoint(info, path, _drawn_per_step(config), config.seed)
        _check_continues(config, state)
        policy.set_version(state.version)
        folder.start_at(state)
    except BaseException:
        await policy.close()
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
            f"resume_from: {state.path} is of step {state.step}, and the run has {config.steps} steps.",
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


def with_fresh_folder(config: RunConfig, part: str = "") -> RunConfig:
    """With `resume: rename` and a run in the folder, the configuration with the new folder FOLDER_YYYYmmddHHMMSS.

    The commands and the Python API apply it once, before they start the run. `part`: look for this part of a run, such
    as `bench`, in place of a training run.
    """
    folder = folder_path(config)
    if config.resume != "rename" or not (folder / part / SETTINGS).exists():
        return config
    return config.model_copy(update={"folder": f"{folder}_{time.strftime('%Y%m%d%H%M%S')}"})


def folder_path(config: RunConfig) -> Path:
    """Path of the run folder."""
    return Path(config.folder or f"runs/{config.name}").expanduser()
