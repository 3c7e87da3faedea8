"""Evaluation of the policy on held-out tasks.

An answer is right if its reward reaches a threshold. pass@k is the unbiased estimate of the probability that at least
one of k answers is right: 1 - C(n - c, k) / C(n, k) with c of n right, averaged over tasks. A failed rollout is wrong.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from tinsmith.rl.data.tasks import HeldOutTasks
from tinsmith.rl.metrics import reward_metrics
from tinsmith.rl.policy.base import SamplingConfig, Snapshot, request_seed
from tinsmith.rl.policy.training_rows import count_policy_tokens
from tinsmith.rl.rewards import RewardConfig, Rewards
from tinsmith.rl.rollouts.runner import RolloutRunner
from tinsmith.rl.types import Group, Rollout, Task, Turn
from tinsmith.rl.workflows import WorkflowConfig
from tinsmith.rl.workflows.base import Workflow
from tinsmith.settings import Needs, Settings

_EVALUATION = 1
"""Keeps an evaluation's seeds apart from a step's."""


class EvalSource(Settings):
    """Evaluation settings of one source of held-out tasks; unset keys are those of `eval`."""

    num_samples: int | None = Field(default=None, ge=1)
    """Answers to each task."""
    temperature: float | None = Field(default=None, ge=0)
    """0 is greedy."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Keep the likeliest tokens that make up this share."""
    top_k: int | None = Field(default=None, ge=-1)
    """Keep this many likeliest tokens; -1 is all."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest answer."""
    workflow: WorkflowConfig | None = None
    """Workflow for these tasks."""
    rewards: tuple[RewardConfig, ...] = ()
    """What judges an answer."""


class EvalConfig(Settings):
    """When and how held-out tasks are evaluated."""

    every: int = Field(default=10, ge=0)
    """Every so many steps, the last one too if it is such a step; 0 is never."""
    before: bool = True
    """Before the first step."""
    after: bool = True
    """After the last step, whatever `every` says."""
    limit: int = Field(default=0, ge=0)
    """Only the first so many held-out tasks; 0 is all."""
    num_samples: int = Field(default=1, ge=1)
    """Answers to each task; pass@k is reported for k = 1, 2, 4, … and this number."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Keep the likeliest tokens that make up this share; not set: as in training."""
    top_k: int | None = Field(default=None, ge=-1)
    """Keep this many likeliest tokens, -1 being all; not set: as in training."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest answer; not set: as in training."""
    workflow: WorkflowConfig | None = None
    """Workflow for held-out tasks; not set: as in training."""
    rewards: tuple[RewardConfig, ...] = ()
    """What judges an answer; empty: the run's rewards."""
    sources: dict[str, EvalSource] = Field(default_factory=dict)
    """By names of tasks.eval: what is otherwise there."""
    threshold: float = 1.0
    """An answer is right where its reward is at least this."""
    baseline: Annotated[int, Needs("before", (True,))] = Field(default=0, ge=0)
    """Number of constant answers to score as a baseline, most common right answers first; 0 is none."""

    @model_validator(mode="after")
    def _samples_differ(self) -> EvalConfig:
        for one in (self, *map(self.of, self.sources)):
            if one.num_samples > 1 and one.temperature == 0:
                raise ValueError("num_samples above 1 wants a temperature above 0; greedy answers are all the same")
        return self

    def of(self, name: str) -> EvalConfig:
        """What counts for the source of that name."""
        own = self.sources.get(name, EvalSource())
        return self.model_copy(update={key: value for key, value in own if key in own.model_fields_set})

    def due(self, step: int, steps: int) -> bool:
        """Whether to evaluate after `step` of `steps`; step 0 is before the first."""
        if step == 0:
            return self.before
        return (self.every > 0 and step % self.every == 0) or (self.after and step == steps)

    def sampling(self, training: SamplingConfig) -> SamplingConfig:
        """As in training but for what is set here."""
        change = {"top_p": self.top_p, "top_k": self.top_k, "max_tokens": self.max_tokens}
        given = {key: value for key, value in change.items() if value is not None}
        return training.model_copy(update={"temperature": self.temperature, **given})


class BenchConfig(Settings):
    """What mode bench compares."""

    checkpoints: tuple[str, ...] = ()
    """tinker:// paths; empty: those of the run that the folder holds."""
    of_run: Literal["last", "all"] = "last"
    """Without `checkpoints`: the run's last weights, or all that it saved and still keeps, oldest first."""
    base: bool = True
    """The base model too, first."""

    @model_validator(mode="after")
    def _said_once(self) -> BenchConfig:
        if self.checkpoints and "of_run" in self.model_fields_set:
            raise ValueError("of_run chooses among a run's own, and checkpoints names them; leave out one")
        return self


@dataclass(frozen=True, slots=True)
class _Tried:
    """A source of held-out tasks, and how they are tried."""

    name: str
    tasks: tuple[Task, ...]
    workflow: Workflow
    size: int


class Evaluator:
    """Held-out tasks and their judges."""

    def __init__(
        self,
        config: EvalConfig,
        held_out: HeldOutTasks,
        making: Callable[[EvalConfig], Workflow],
        seed: int,
        runner: RolloutRunner,
    ) -> None:
        """`making` gives the workflow that samples and scores as one source's settings say."""
        self._config, self._seed, self._runner = config, seed, runner
        self._parts: list[_Tried] = []
        for name, tasks in held_out.items():
            one, cut = config.of(name), tasks[: config.limit or len(tasks)]
            if cut:
                self._parts.append(_Tried(name, tuple(cut), making(one), one.num_samples))

    def due(self, step: int, steps: int) -> bool:
        """Whether there is something to do after `step`."""
        return bool(self._parts) and self._config.due(step, steps)

    async def run(self, step: int, policy: Snapshot) -> tuple[tuple[Group, ...], dict[str, float]]:
        """A group for each held-out task, and what they amount to: together, and by source where there are several."""
        found = await asyncio.gather(*(self._try(number, step, policy) for number in range(len(self._parts))))
        groups = tuple(group for part in found for group in part)
        values = self._amounts(groups, "eval")
        for one, part in zip(self._parts, found, strict=True):
            if one.name:
                values |= self._amounts(part, f"eval/{one.name}")
        return groups, values

    async def _try(self, number: int, step: int, policy: Snapshot) -> tuple[Group, ...]:
        one, before = self._parts[number], sum(len(part.tasks) for part in self._parts[:number])
        seeds = [request_seed(self._seed, step, before + index, _EVALUATION) for index in range(len(one.tasks))]
        return await self._runner.run_groups(one.workflow, one.tasks, policy, size=one.size, seeds=seeds)

    async def baseline(self, rewards: Rewards, policy: Snapshot) -> dict[str, float]:
        """What the best of the commonest right answers would score if it were always given."""
        tasks = [task for part in self._parts for task in part.tasks]
        answers = Counter(task.answer for task in tasks).most_common(self._config.baseline)
        said = [Turn(prompt=(), tokens=(), logprobs=(), text=answer, stop="stop") for answer, _ in answers if answer]
        scores = [[(await rewards.score(task, Rollout(turns=(turn,)), policy))[0] for task in tasks] for turn in said]
        if not scores:
            return {}
        threshold = self._config.threshold - 1e-9
        return {
            "eval/constant_pass@1": max(float(np.mean([one >= threshold for one in row])) for row in scores),
            "eval/constant_reward": max(float(np.mean(row)) for row in scores),
        }

    def _amounts(self, groups: Sequence[Group], prefix: str) -> dict[str, float]:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        good = [rollout for rollout in rollouts if not rollout.error]
        return {
            **pass_at(groups, self._config.threshold, prefix),
            **reward_metrics(f"{prefix}/reward", good),
            f"{prefix}/failed": len(rollouts) - len(good),
            f"{prefix}/tokens": float(np.mean([count_policy_tokens(rollout) for rollout in good])) if good else 0.0,
            f"{prefix}/tasks": len(groups),
        }


def pass_at(groups: Sequence[Group], threshold: float, prefix: str = "eval") -> dict[str, float]:
    """PREFIX/pass@k for k = 1, 2, 4, … and n, the rollouts of the smallest group."""
    sizes = [len(group.rollouts) for group in groups]
    right = [
        sum(not rollout.error and rollout.reward >= threshold - 1e-9 for rollout in group.rollouts) for group in groups
    ]
    least = min(sizes)
    ks = sorted({2**power for power in range(least.bit_length()) if 2**power <= least} | {least})
    estimates = {k: [_pass_at(n, c, k) for n, c in zip(sizes, right, strict=True)] for k in ks}
    return {f"{prefix}/pass@{k}": float(np.mean(each)) for k, each in estimates.items()}


def _pass_at(n: int, c: int, k: int) -> float:
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
