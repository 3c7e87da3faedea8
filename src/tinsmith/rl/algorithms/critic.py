"""The critic: a second adapter on the same base model that predicts the return at every token.

Its value at a position is read from the logprobs of K reserved tokens. Each token stands for a value bin, and the value
is the mean of the bin centers, weighted by the probabilities q among the K tokens. The training target t is a Gaussian
around the return (HL-Gauss, arXiv 2403.03950), and the loss is the cross entropy of t and q. Its gradient with respect
to the logprobs of the K tokens is q - t, which sums to 0: so the loss is cross_entropy with the weights t - q, and the
rest of the vocabulary is unchanged. This needs only targets of shape (N, K), which every Tinker API server has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field, model_validator

from tinsmith.rl.optimizer import OptimizerConfig
from tinsmith.rl.policy.trainer import AuxiliaryAdapter
from tinsmith.rl.policy.training_rows import TrainingRow
from tinsmith.settings import Settings

_TINY = 1e-30
"""Keeps the logarithm of a probability of 0 finite."""


class CriticConfig(Settings):
    """The critic: its adapter, its value bins and its training."""

    rank: int = Field(default=32, ge=1)
    """LoRA rank of the critic's adapter."""
    bins: int = Field(default=32, ge=2, le=256)
    """Number of value bins, K. The value is the mean of the bin centers, weighted by their probabilities."""
    low: float = -0.5
    """Center of the lowest bin. Choose it below every return: a value cannot be lower."""
    high: float = 1.5
    """Center of the highest bin. Choose it above every return: a value cannot be higher."""
    first_token: int | None = Field(default=None, ge=0)
    """First of the K token ids that stand for the bins; not set: the last K ids of the vocabulary."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-4)
    """Optimizer of the critic. Its learning rate is usually higher than the policy's."""
    epochs: int = Field(default=1, ge=1)
    """Updates of the critic in each step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps at the start in which only the critic is trained."""
    clip: float | None = Field(default=None, gt=0)
    """Clip returns to this distance from the predicted value; null: no clipping."""

    @model_validator(mode="after")
    def _check_range(self) -> CriticConfig:
        if self.high <= self.low:
            raise ValueError(f"high is {self.high:g}; set it above low, {self.low:g}")
        return self


@dataclass(frozen=True, slots=True)
class Bins:
    """K value bins with evenly spaced centers."""

    centers: np.ndarray
    """float64 [K]."""

    @classmethod
    def from_config(cls, config: CriticConfig) -> Bins:
        """Bins from `low` to `high` of the settings."""
        return cls(np.linspace(config.low, config.high, config.bins))

    def values(self, logprobs_NK: np.ndarray) -> np.ndarray:
        """float64 [N]: mean of the bin centers, weighted by the probabilities among the K tokens."""
        return normalized_probs(logprobs_NK) @ self.centers

    def targets(self, values_N: np.ndarray) -> np.ndarray:
        """float64 [N, K], rows of sum 1: a Gaussian of 0.75 bin widths around each value, truncated at both ends."""
        width = self.centers[1] - self.centers[0]
        edges = np.append(self.centers - width / 2, self.centers[-1] + width / 2)
        inside = np.clip(values_N, self.centers[0], self.centers[-1])
        scale = 0.75 * width * math.sqrt(2.0)
        cumulative = np.vectorize(math.erf)((edges[None] - inside[:, None]) / scale)
        mass = np.diff(cumulative, axis=1)
        return mass / mass.sum(axis=1, keepdims=True)


class Critic:
    """Predicts values and learns returns, in an adapter of its own."""

    def __init__(self, config: CriticConfig, adapter: AuxiliaryAdapter, steps: int) -> None:
        """`steps`: number of steps of the run, for the learning-rate schedule."""
        self.config, self._adapter, self._steps = config, adapter, steps
        self._bins = Bins.from_config(config)
        first = adapter.vocabulary - config.bins if config.first_token is None else config.first_token
        self._ids = tuple(range(first, first + config.bins))
        self._cached_logprobs: dict[bytes, np.ndarray] = {}

    async def values(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        """Predicted return before each target, float32 [N] for each row."""
        logprobs = await self._adapter.logprobs(rows, self._ids)
        self._cached_logprobs = {_key(row): logprobs_NK for row, logprobs_NK in zip(rows, logprobs, strict=True)}
        return [self._bins.values(logprobs_NK).astype(np.float32) for logprobs_NK in logprobs]

    async def learn(self, step: int, rows: Sequence[TrainingRow]) -> dict[str, float]:
        """Train on the column `returns` of the rows. Returns metrics, with the explained variance of `values`."""
        rate = self.config.optimizer.learning_rate_at(step, self._steps)
        targets = [self._bins.targets(self._clipped_returns(row)) for row in rows]
        count = sum(int(row.mask.sum()) for row in rows)
        numbers: dict[str, float] = {}
        loss = 0.0
        for _ in range(self.config.epochs):
            probs = [normalized_probs(logprobs_NK) for logprobs_NK in await self._logprobs(rows)]
            fitted = list(zip(rows, targets, probs, strict=True))
            weights = [np.where(row.mask[:, None], (t - q) / count, 0.0).astype(np.float32) for row, t, q in fitted]
            loss = sum(float(-(t * np.log(q + _TINY))[row.mask].sum()) for row, t, q in fitted) / count
            numbers = await self._adapter.fit(rows, self._ids, weights, self.config.optimizer, rate)
            self._cached_logprobs = {}
        server_metrics = {f"critic/{name.partition(':')[0]}": value for name, value in numbers.items()}
        return {**server_metrics, **value_metrics(rows), "critic/loss": loss, "critic/lr": rate}

    async def save(self, name: str, ttl_seconds: int | None) -> str:
        """Save adapter and optimizer state; returns the tinker:// path."""
        return await self._adapter.save(name, ttl_seconds)

    async def _logprobs(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        """Current logprobs, float32 [N, K] for each row; those of `values` if the weights have not changed since."""
        if all(_key(row) in self._cached_logprobs for row in rows):
            return [self._cached_logprobs[_key(row)] for row in rows]
        return await self._adapter.logprobs(rows, self._ids)

    def _clipped_returns(self, row: TrainingRow) -> np.ndarray:
        returns_N, values_N = row.columns["returns"].astype(np.float64), row.columns["values"].astype(np.float64)
        if self.config.clip is None:
            return returns_N
        return values_N + np.clip(returns_N - values_N, -self.config.clip, self.config.clip)


def normalized_probs(logprobs_NK: np.ndarray) -> np.ndarray:
    """Probabilities among the K tokens, float64 [N, K] with rows of sum 1."""
    shifted = logprobs_NK.astype(np.float64)
    probs = np.exp(shifted - shifted.max(axis=1, keepdims=True))
    return probs / probs.sum(axis=1, keepdims=True)


def _key(row: TrainingRow) -> bytes:
    return row.tokens.tobytes()


def value_metrics(rows: Sequence[TrainingRow]) -> dict[str, float]:
    """Means of values and returns, and critic/explained_variance = 1 - Var(return - value) / Var(return) over tokens.

    The explained variance is 0 if returns do not vary.
    """
    returns_T = np.concatenate([row.columns["returns"][row.mask] for row in rows]).astype(np.float64)
    values_T = np.concatenate([row.columns["values"][row.mask] for row in rows]).astype(np.float64)
    variance = float(returns_T.var())
    return {
        "critic/explained_variance": 1.0 - float((returns_T - values_T).var()) / variance if variance > 0 else 0.0,
        "critic/value_mean": float(values_T.mean()),
        "critic/return_mean": float(returns_T.mean()),
    }
