"""The gradient of a step in parts, each computed as soon as its groups have been sampled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tinsmith.rl.algorithms.algorithm import Algorithm
from tinsmith.rl.optimizer import OptimizerConfig
from tinsmith.rl.policy.trainer import Trainer, Update, UpdateResult
from tinsmith.rl.policy.training_rows import TrainingRow
from tinsmith.rl.record.update_metrics import update_metrics
from tinsmith.rl.types import Group


class GradientStream:
    """Adds up the gradients of the groups of a step, and takes one optimizer step with the sum.

    Example: stream = GradientStream(step, algorithm, policy); await stream.add(groups) for each part; then
    await stream.finish(optimizer, rate).
    """

    def __init__(
        self, step: int, algorithm: Algorithm, policy: Trainer, demonstrations: Sequence[TrainingRow] = ()
    ) -> None:
        """Equals the gradient of the whole step for algorithms without `stream_fault`."""
        self._step, self._algorithm, self._policy = step, algorithm, policy
        self._demonstrations = demonstrations
        self._results: list[tuple[Update, UpdateResult]] = []
        self._numbers: dict[str, float] = defaultdict(float)
        self._tokens = 0

    @property
    def results(self) -> Sequence[tuple[Update, UpdateResult]]:
        """The parts of the gradient, with what the server returned for each."""
        return self._results

    async def add(self, groups: Sequence[Group]) -> None:
        """Compute the gradient of groups that pass the filters; the first part includes the step's demonstrations."""
        demonstrations, self._demonstrations = self._demonstrations, ()
        update = await self._algorithm.score_part(self._step, groups, demonstrations)
        self._add_numbers(update, groups)
        if update.rows:
            self._results.append((update, await self._policy.accumulate(update)))

    async def finish(self, optimizer: OptimizerConfig, rate: float) -> dict[str, float]:
        """Take the optimizer step, unless no part has a gradient; returns the metrics of the step."""
        if not self._results:
            return {"optim/skipped": 1.0, "optim/lr": rate, **self._numbers}
        stepped = await self._policy.step(optimizer, rate)
        rows = [row for update, _ in self._results for row in update.rows]
        return {
            **update_metrics(self._results, streamed=True),
            **{f"optim/{name.partition(':')[0]}": float(value) for name, value in stepped.items()},
            "optim/lr": rate,
            **self._numbers,
            **self._algorithm.adapt_coefficients(self._results, rows, self._numbers),
        }

    def _add_numbers(self, update: Update, groups: Sequence[Group]) -> None:
        """Add the metrics of a part: counts add up, and the divergence is a mean over tokens."""
        tokens = sum(rollout.sampled_tokens for group in groups for rollout in group.rollouts)
        self._tokens += tokens
        for name, value in update.numbers.items():
            if name == "reward/kl":
                self._numbers[name] += (value - self._numbers[name]) * tokens / max(1, self._tokens)
            else:
                self._numbers[name] += value
