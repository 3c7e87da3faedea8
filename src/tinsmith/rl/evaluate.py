"""Evaluation of the policy on held-out tasks: what is sampled, and its metrics (record/metrics.py)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from tinsmith.rl.data.tasks import HeldOutTasks
from tinsmith.rl.evaluation.benchmarks import Benchmark, metrics_of, run_on_policy
from tinsmith.rl.evaluation.libraries import check_package
from tinsmith.rl.evaluation.scores import Scores
from tinsmith.rl.evaluation_functions import CustomEvaluation, function_metrics
from tinsmith.rl.policy.sampling import SamplingConfig, Snapshot, request_seed
from tinsmith.rl.record.metrics import equal_replies, is_right, pass_at, reward_metrics, role_metrics, workflow_metrics
from tinsmith.rl.rewards import RewardConfig, Rewards
from tinsmith.rl.rollouts.runner import RolloutRunner
from tinsmith.rl.types import Group, Rollout, Task, Turn
from tinsmith.rl.workflows import WorkflowConfig
from tinsmith.rl.workflows.base import Workflow, WorkflowContext
from tinsmith.rl.workflows.scoring import scored
from tinsmith.settings import Needs, Settings

_EVALUATION = 1
"""Separates the sampling seeds of an evaluation from those of training."""


class EvalSource(Settings):
    """Evaluation settings of one source of held-out tasks; keys that are not set are those of `eval`."""

    num_samples: int | None = Field(default=None, ge=1)
    """Answers sampled for each task."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float | None = Field(default=None, ge=0, le=1)
    """Sample from the most likely tokens with this total probability."""
    top_k: int | None = Field(default=None, ge=-1)
    """Sample from this many most likely tokens; -1: all."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Largest number of tokens in an answer."""
    workflow: WorkflowConfig | None = None
    """Workflow for these tasks."""
    rewards: tuple[RewardConfig, ...] = ()
    """Reward functions for these tasks."""


class EvalConfig(Settings):
    """When and how held-out tasks are evaluated."""

    every: int = Field(default=10, ge=0)
    """Evaluate every this many steps; 0: not during training."""
    before: bool = True
    """Evaluate before the first step."""
    after: bool = True
    """Evaluate after the last step, even if it is not a multiple of `every`."""
    limit: int = Field(default=0, ge=0)
    """Use only this many held-out tasks of each source, the first ones; 0: all."""
    num_samples: int = Field(default=1, ge=1)
    """Answers sampled for each task. pass@k is reported for k = 1, 2, 4, … and this number."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float | None = Field(default=None, ge=0, le=1)
    """Sample from the most likely tokens with this total probability, 0: greedy; not set: as in training."""
    top_k: int | None = Field(default=None, ge=-1)
    """Sample from this many most likely tokens, -1: all; not set: as in training."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Largest number of tokens in an answer; not set: as in training."""
    workflow: WorkflowConfig | None = None
    """Workflow for held-out tasks; not set: as in training."""
    rewards: tuple[RewardConfig, ...] = ()
    """Reward functions of the evaluation; empty: the rewards of the run."""
    sources: dict[str, EvalSource] = Field(default_factory=dict)
    """Settings of single sources, by their names in tasks.eval; they override the keys above."""
    functions: tuple[CustomEvaluation, ...] = ()
    """Functions of your own from the policy to metrics, called at every evaluation (docs/code/extend.md)."""
    benchmarks: tuple[Benchmark, ...] = ()
    """Benchmarks to run at every evaluation, by name: [gsm8k, {name: ifeval, chat: true, limit: 100}]. Their metrics
    are eval/benchmark/TASK/METRIC."""
    compare: bool = True
    """Compare the evaluations before the first step and after the last one, task by task: comparison.tsv and the report
    have the differences with confidence intervals and p-values. Nothing more is sampled. Needs `before` and `after`."""
    threshold: float = 1.0
    """Where neither the workflow nor a reward says what is right: an answer is right if its reward is at least this."""
    baseline: Annotated[int, Needs("before", (True,))] = Field(default=0, ge=0)
    """Number of constant answers to score as a baseline, most common right answers first; 0 is none."""

    @model_validator(mode="after")
    def _check_temperature(self) -> EvalConfig:
        for settings in (self, *map(self.of_source, self.sources)):
            if settings.num_samples > 1 and (settings.temperature == 0 or settings.top_p == 0):
                raise ValueError(
                    "num_samples above 1 needs a temperature and a top_p above 0, because greedy answers are identical"
                )
        return self

    def of_source(self, name: str) -> EvalConfig:
        """The settings of the source `name` of held-out tasks."""
        own = self.sources.get(name, EvalSource())
        return self.model_copy(update={key: value for key, value in own if key in own.model_fields_set})

    def due(self, step: int, steps: int) -> bool:
        """Whether to evaluate after `step` of `steps`; step 0 is before the first."""
        if step == 0:
            return self.before
        return (self.every > 0 and step % self.every == 0) or (self.after and step == steps)

    def sampling(self, training: SamplingConfig) -> SamplingConfig:
        """Sampling settings of the evaluation: those of training, with the keys set here."""
        change = {"top_p": self.top_p, "top_k": self.top_k, "max_tokens": self.max_tokens}
        overrides = {key: value for key, value in change.items() if value is not None}
        return training.model_copy(update={"temperature": self.temperature, **overrides})


class BenchConfig(Settings):
    """The checkpoints that mode bench compares."""

    checkpoints: tuple[str, ...] = ()
    """tinker:// paths to compare; empty: checkpoints of the run in the folder."""
    of_run: Literal["last", "all"] = "last"
    """Without `checkpoints`: compare the last checkpoint of the run, or all that still exist, oldest first."""
    base: bool = True
    """Compare the base model too, as the first."""

    @model_validator(mode="after")
    def _check_checkpoints(self) -> BenchConfig:
        if self.checkpoints and "of_run" in self.model_fields_set:
            raise ValueError("of_run is not used with checkpoints; leave out one")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What an evaluation found.

    Example: Evaluation(groups=groups, values={"eval/reward/mean": 0.4})
    """

    groups: tuple[Group, ...]
    """A group for each held-out task."""
    values: dict[str, float]
    """Metrics of all tasks, of each source, of functions and of benchmarks."""
    scores: Scores = field(default_factory=dict)
    """Scores of the benchmarks, by problem."""


@dataclass(frozen=True, slots=True)
class _EvalPart:
    """A source of held-out tasks, and how it is evaluated."""

    name: str
    tasks: tuple[Task, ...]
    workflow: Workflow
    size: int
    """Answers to each task."""


class Evaluator:
    """Samples and scores answers to the held-out tasks."""

    def __init__(
        self,
        config: EvalConfig,
        held_out: HeldOutTasks,
        make_workflow: Callable[[str, EvalConfig], Workflow],
        seed: int,
        runner: RolloutRunner,
        rewards: Rewards | None = None,
        context: WorkflowContext | None = None,
    ) -> None:
        """`make_workflow` makes the workflow of a source from its name and settings. `rewards` score the baseline.
        `context` is that of the functions and benchmarks of `config`; without one, they are left out. Raises
        ConfigError for a benchmark whose package is not installed."""
        self._functions, self._context = config.functions if context else (), context
        self._benchmarks = config.benchmarks if context else ()
        for benchmark in self._benchmarks:
            check_package(benchmark.name)
        self._config, self._seed, self._runner, self._rewards = config, seed, runner, rewards
        self._parts: list[_EvalPart] = []
        for name, tasks in held_out.items():
            settings, selected = config.of_source(name), tasks[: config.limit or len(tasks)]
            if selected:
                workflow = make_workflow(name, settings)
                self._parts.append(_EvalPart(name, tuple(selected), workflow, settings.num_samples))

    def due(self, step: int, steps: int) -> bool:
        """Whether to evaluate after `step`: it is due, and there are held-out tasks, functions or benchmarks."""
        return bool(self._parts or self._functions or self._benchmarks) and self._config.due(step, steps)

    @property
    def sources(self) -> list[str]:
        """The name of the source of each task that is evaluated, in the order of `run`."""
        return [part.name for part in self._parts for _ in part.tasks]

    async def run(self, step: int, policy: Snapshot) -> Evaluation:
        """Evaluate the policy."""
        results = await asyncio.gather(*(self._run_part(number, step, policy) for number in range(len(self._parts))))
        groups = tuple(group for part_groups in results for group in part_groups)
        values = self._metrics(groups, "eval") if groups else {}
        for part, part_groups in zip(self._parts, results, strict=True):
            if part.name:
                values |= self._metrics(part_groups, f"eval/{part.name}")
        limited = self._runner.requests.around(policy)
        scores: Scores = {}
        if self._context is not None:
            values |= await function_metrics(self._functions, step, limited, self._context, self._seed)
            scores = await run_on_policy(self._benchmarks, limited, self._context.agent_endpoint, self._seed)
        return Evaluation(groups=groups, values={**values, **metrics_of(scores)}, scores=scores)

    async def _run_part(self, number: int, step: int, policy: Snapshot) -> tuple[Group, ...]:
        part, first = self._parts[number], sum(len(earlier.tasks) for earlier in self._parts[:number])
        seeds = [request_seed(self._seed, step, first + index, _EVALUATION) for index in range(len(part.tasks))]
        return await self._runner.run_groups(part.workflow, part.tasks, policy, size=part.size, seeds=seeds)

    async def baseline(self, policy: Snapshot) -> dict[str, float]:
        """Score of the best constant answer, among the `baseline` most common right answers; empty without rewards."""
        if (rewards := self._rewards) is None:
            return {}
        tasks = [task for part in self._parts for task in part.tasks]
        answers = Counter(task.answer for task in tasks).most_common(self._config.baseline)
        turns = [Turn(prompt=(), tokens=(), logprobs=(), text=answer, stop="stop") for answer, _ in answers if answer]
        rollouts = [[await scored(task, Rollout.single((turn,)), rewards, policy) for task in tasks] for turn in turns]
        if not rollouts:
            return {}
        right = [[is_right(each, self._config.threshold) for each in row] for row in rollouts]
        return {
            "eval/constant_pass@1": max(float(np.mean(row)) for row in right),
            "eval/constant_reward": max(float(np.mean([each.reward for each in row])) for row in rollouts),
        }

    def _metrics(self, groups: Sequence[Group], prefix: str) -> dict[str, float]:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        good = [rollout for rollout in rollouts if not rollout.error]
        mixed = prefix == "eval" and any(group.task.environment for group in groups)
        return {
            **pass_at(groups, self._config.threshold, prefix),
            **reward_metrics(f"{prefix}/reward", good),
            **role_metrics(f"{prefix}/reward", good),
            **({} if mixed else workflow_metrics(f"{prefix}/workflow", good)),
            **{f"{prefix}/equal": share for name, share in equal_replies(groups).items() if name == "rollouts/equal"},
            f"{prefix}/judged": float(np.mean([rollout.correct is not None for rollout in rollouts])),
            f"{prefix}/failed": len(rollouts) - len(good),
            f"{prefix}/tokens": float(np.mean([rollout.sampled_tokens for rollout in good])) if good else 0.0,
            f"{prefix}/tasks": len(groups),
        }
