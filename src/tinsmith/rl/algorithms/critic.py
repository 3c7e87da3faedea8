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
from tinsmith.rl.policy.base import AuxiliaryAdapter
from tinsmith.rl.policy.training_rows import TrainingRow
from tinsmith.settings import Settings

_TINY = 1e-30
"""Keeps the logarithm of a probability of 0 finite."""


class CriticConfig(Settings):
    """A critic and how it learns."""

    rank: int = Field(default=32, ge=1)
    """Of its adapter."""
    bins: int = Field(default=32, ge=2, le=256)
    """K: number of value bins."""
    low: float = -0.5
    """Center of the lowest bin: below every return."""
    high: float = 1.5
    """Center of the highest bin: above every return."""
    first_token: int | None = Field(default=None, ge=0)
    """The first of the K token ids that stand for the bins; not set: the last K of the vocabulary."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-4)
    """Of the critic alone."""
    epochs: int = Field(default=1, ge=1)
    """Updates of the critic in each step."""
    warmup_steps: int = Field(default=0, ge=0)
    """First steps in which only the critic learns."""
    clip: float | None = Field(default=None, gt=0)
    """Returns to learn from are clipped to this distance from the predicted value; null is no bound."""

    @model_validator(mode="after")
    def _range_is_one(self) -> CriticConfig:
        if self.high <= self.low:
            raise ValueError(f"high {self.high:g} is not above low {self.low:g}")
        return self


@dataclass(frozen=True, slots=True)
class Bins:
    """K centers, evenly from low to high."""

    centers: np.ndarray
    """float64 [K]."""

    @classmethod
    def from_config(cls, config: CriticConfig) -> Bins:
        """As configured."""
        return cls(np.linspace(config.low, config.high, config.bins))

    def values(self, logprobs_NK: np.ndarray) -> np.ndarray:
        """float64 [N]: mean bin centers."""
        return normalized_probs(logprobs_NK) @ self.centers

    def targets(self, values_N: np.ndarray) -> np.ndarray:
        """float64 [N, K], rows of sum 1: a Gaussian of 0.75 bin widths around each value, cut at the bins' edges."""
        width = self.centers[1] - self.centers[0]
        edges = np.append(self.centers - width / 2, self.centers[-1] + width / 2)
        inside = np.clip(values_N, self.centers[0], self.centers[-1])
        scale = 0.75 * width * math.sqrt(2.0)
        below = np.vectorize(math.erf)((edges[None] - inside[:, None]) / scale)
        mass = np.diff(below, axis=1)
        return mass / mass.sum(axis=1, keepdims=True)


class Critic:
    """Tells values and learns returns."""

    def __init__(self, config: CriticConfig, learner: AuxiliaryAdapter, steps: int) -> None:
        """`steps` of the run, for the learning rate's course."""
        self.config, self._learner, self._steps = config, learner, steps
        self._bins = Bins.from_config(config)
        first = learner.vocabulary - config.bins if config.first_token is None else config.first_token
        self._ids = tuple(range(first, first + config.bins))
        self._cached_logprobs: dict[bytes, np.ndarray] = {}

    async def values(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        """float32 [N] of each row: what the whole is worth, as seen before each target."""
        found = await self._learner.logprobs(rows, self._ids)
        self._cached_logprobs = {_key(row): logprobs_NK for row, logprobs_NK in zip(rows, found, strict=True)}
        return [self._bins.values(logprobs_NK).astype(np.float32) for logprobs_NK in found]

    async def learn(self, step: int, rows: Sequence[TrainingRow]) -> dict[str, float]:
        """Fit each row's `returns`; returns metrics, among them how well `values` predicted them."""
        rate = self.config.optimizer.learning_rate_at(step, self._steps)
        targets = [self._bins.targets(self._bounded(row)) for row in rows]
        count = sum(int(row.mask.sum()) for row in rows)
        numbers: dict[str, float] = {}
        loss = 0.0
        for _ in range(self.config.epochs):
            probs = [normalized_probs(logprobs_NK) for logprobs_NK in await self._logprobs(rows)]
            fitted = list(zip(rows, targets, probs, strict=True))
            weights = [np.where(row.mask[:, None], (t - q) / count, 0.0).astype(np.float32) for row, t, q in fitted]
            loss = sum(float(-(t * np.log(q + _TINY))[row.mask].sum()) for row, t, q in fitted) / count
            numbers = await self._learner.fit(rows, self._ids, weights, self.config.optimizer, rate)
            self._cached_logprobs = {}
        server_metrics = {f"critic/{name.partition(':')[0]}": value for name, value in numbers.items()}
        return {**server_metrics, **value_metrics(rows), "critic/loss": loss, "critic/lr": rate}

    async def save(self, name: str, ttl_seconds: int | None) -> str:
        """The path to go on from."""
        return await self._learner.save(name, ttl_seconds)

    async def _logprobs(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        """float32 [N, K] of each row, now; reused from `values` if the weights have not changed."""
        if all(_key(row) in self._cached_logprobs for row in rows):
            return [self._cached_logprobs[_key(row)] for row in rows]
        return await self._learner.logprobs(rows, self._ids)

    def _bounded(self, row: TrainingRow) -> np.ndarray:
        returns_N, values_N = row.columns["returns"].astype(np.float64), row.columns["values"].astype(np.float64)
        if self.config.clip is None:
            return returns_N
        return values_N + np.clip(returns_N - values_N, -self.config.clip, self.config.clip)


def normalized_probs(logprobs_NK: np.ndarray) -> np.ndarray:
    """float64 [N, K], rows of sum 1: probabilities among the K tokens."""
    shifted = logprobs_NK.astype(np.float64)
    probs = np.exp(shifted - shifted.max(axis=1, keepdims=True))
    return probs / probs.sum(axis=1, keepdims=True)


def _key(row: TrainingRow) -> bytes:
    return row.tokens.tobytes()


def value_metrics(rows: Sequence[TrainingRow]) -> dict[str, float]:
    """critic/explained_variance = 1 - Var(return - value) / Var(return) over tokens; 0 where returns do not vary."""
    returns_T = np.concatenate([row.columns["returns"][row.mask] for row in rows]).astype(np.float64)
    values_T = np.concatenate([row.columns["values"][row.mask] for row in rows]).astype(np.float64)
    variance = float(returns_T.var())
    return {
        "critic/explained_variance": 1.0 - float((returns_T - values_T).var()) / variance if variance > 0 else 0.0,
        "critic/value_mean": float(values_T.mean()),
        "critic/return_mean": float(returns_T.mean()),
    }
