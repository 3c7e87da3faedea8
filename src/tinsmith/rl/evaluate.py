"""How good the policy is on held-out tasks: the same rollouts, no update.

An answer is right where the reward reaches a threshold. pass@k is the unbiased estimate of the chance that at least one
of k answers is right: 1 - C(n - c, k) / C(n, k) with c of n right, averaged over tasks. A failed rollout is not right.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from pydantic import Field, model_validator

from tinsmith.rl.metrics import of_rewards
from tinsmith.rl.policy import SamplingConfig, Snapshot, request_seed
from tinsmith.rl.rewards import RewardConfig, Rewards
from tinsmith.rl.samples import spoken
from tinsmith.rl.tasks import Held
from tinsmith.rl.tries import Tries
from tinsmith.rl.types import Group, Rollout, Turn
from tinsmith.rl.workflows.base import Workflow
from tinsmith.settings import Settings

_EVALUATION = 1
"""Keeps an evaluation's seeds apart from a step's."""


class EvalConfig(Settings):
    """When and how held-out tasks are tried."""

    every: int = Field(default=10, ge=0)
    """Every so many steps; 0 is never in between."""
    before: bool = True
    """Before the first step."""
    after: bool = True
    """After the last step."""
    limit: int = Field(default=0, ge=0)
    """Only the first so many held-out tasks; 0 is all."""
    num_samples: int = Field(default=1, ge=1)
    """Answers to each task; pass@k is told for every power of two up to it, and for itself."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest answer; not set: as in training."""
    rewards: tuple[RewardConfig, ...] = ()
    """What judges an answer; empty: the run's rewards."""
    threshold: float = 1.0
    """An answer is right where its reward is at least this."""
    baseline: int = Field(default=0, ge=0)
    """Tell what always giving one answer would score: how many right answers to try so, the commonest first."""

    @model_validator(mode="after")
    def _samples_differ(self) -> EvalConfig:
        if self.num_samples > 1 and self.temperature == 0:
            raise ValueError("num_samples above 1 wants a temperature above 0; greedy answers are all the same")
        return self

    def due(self, step: int, steps: int) -> bool:
        """Whether to evaluate after `step` of `steps`; step 0 is before the first."""
        if step in (0, steps):
            return self.before if step == 0 else self.after
        return self.every > 0 and step % self.every == 0

    def sampling(self, training: SamplingConfig) -> SamplingConfig:
        """As in training but for temperature and length; no top_p or top_k where greedy."""
        change = {"temperature": self.temperature, "max_tokens": self.max_tokens or training.max_tokens}
        return training.model_copy(update=change)


class BenchConfig(Settings):
    """What mode bench compares."""

    checkpoints: tuple[str, ...] = ()
    """tinker:// paths of sampler weights; empty: the last weights of the run that the folder holds."""
    base: bool = True
    """The base model too, first."""


class Evaluator:
    """Held-out tasks and their judge."""

    def __init__(self, config: EvalConfig, held_out: Held, workflow: Workflow, seed: int, tries: Tries) -> None:
        """`workflow` samples and scores as `config` says."""
        self._config, self._workflow, self._seed, self._tries = config, workflow, seed, tries
        cut = {name: tasks[: config.limit or len(tasks)] for name, tasks in held_out.items()}
        self._tasks = tuple(task for tasks in cut.values() for task in tasks)
        self._sizes = {name: len(tasks) for name, tasks in cut.items()}

    def due(self, step: int, steps: int) -> bool:
        """Whether there is something to do after `step`."""
        return bool(self._tasks) and self._config.due(step, steps)

    async def run(self, step: int, policy: Snapshot) -> tuple[tuple[Group, ...], dict[str, float]]:
        """A group for each held-out task, and what they amount to: together, and by source where there are several."""
        seeds = [request_seed(self._seed, step, index, _EVALUATION) for index in range(len(self._tasks))]
        size = self._config.num_samples
        groups = await self._tries.roll(self._workflow, self._tasks, policy, size=size, seeds=seeds)
        values, begin = self._amounts(groups, "eval"), 0
        for name, count in self._sizes.items():
            if name and count:
                values |= self._amounts(groups[begin : begin + count], f"eval/{name}")
            begin += count
        return groups, values

    async def baseline(self, rewards: Rewards, policy: Snapshot) -> dict[str, float]:
        """What the best of the commonest right answers would score if it were always given."""
        answers = Counter(task.answer for task in self._tasks).most_common(self._config.baseline)
        said = [Turn(prompt=(), tokens=(), logprobs=(), text=answer, stop="stop") for answer, _ in answers if answer]
        scores = [
            [(await rewards.score(task, Rollout(turns=(turn,)), policy))[0] for task in self._tasks] for turn in said
        ]
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
            **of_rewards(f"{prefix}/reward", good),
            f"{prefix}/failed": len(rollouts) - len(good),
            f"{prefix}/tokens": float(np.mean([spoken(rollout) for rollout in good])) if good else 0.0,
            f"{prefix}/tasks": len(groups),
        }


def pass_at(groups: Sequence[Group], threshold: float, prefix: str = "eval") -> dict[str, float]:
    """PREFIX/pass@k for k = 1, 2, 4, … and n, where each group has n rollouts."""
    n = len(groups[0].rollouts)
    right = [
        sum(not rollout.error and rollout.reward >= threshold - 1e-9 for rollout in group.rollouts) for group in groups
    ]
    ks = sorted({2**power for power in range(n.bit_length()) if 2**power <= n} | {n})
    return {f"{prefix}/pass@{k}": float(np.mean([_pass_at(n, c, k) for c in right])) for k in ks}


def _pass_at(n: int, c: int, k: int) -> float:
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
