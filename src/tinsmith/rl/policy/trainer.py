"""A model in training: the protocol of it, and the batches that it trains on.

A run uses `tinker.TinkerTrainer`; `tinsmith.testing.ScriptedPolicy` needs no server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from tinsmith.rl.optimizer import OptimizerConfig
from tinsmith.rl.policy.models import Models
from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.policy.training_rows import TrainingRow

ClientLoss = Callable[[Sequence[Any]], tuple[Any, dict[str, float]]]
"""Maps the logprobs of each row (torch tensors [N]) to the loss (a scalar tensor) and metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A batch of an algorithm: training rows, and one loss over all of them.

    Example: Update(rows=(row,), inputs=({"logprobs": q, "advantages": a},), loss="ppo", config={})
    """

    rows: tuple[TrainingRow, ...]
    inputs: tuple[Mapping[str, np.ndarray], ...] = ()
    """Inputs of the server's loss for each row besides the targets: arrays [N]."""
    loss: str = ""
    """Name of the server's loss. Empty if `client` computes the loss."""
    config: Mapping[str, float | str] = field(default_factory=dict)
    """Configuration of the server's loss."""
    more_targets: tuple[np.ndarray, ...] = ()
    """With `client`: int64 [N, K] for each row, further tokens whose logprobs the loss reads, after those of the
    targets: it gets tensors [N, 1 + K]."""
    client: ClientLoss | None = None
    """Custom loss, for algorithms whose loss the server does not have. It costs another forward pass."""
    measure: Callable[[Sequence[np.ndarray]], dict[str, float]] | None = None
    """Metrics of a loss that the server computes, from the logprobs of the rows that it returns."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the algorithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """Result of an update."""

    logprobs: tuple[np.ndarray, ...]
    """Logprobs of each row's targets before the step, float32 [N]."""
    metrics: Mapping[str, float]
    """Metrics of the server's loss and optimizer."""


class AuxiliaryAdapter(Protocol):
    """A second adapter in training that predicts the logprobs of K tokens at every position."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        ...

    async def logprobs(self, rows: Sequence[TrainingRow], ids: Sequence[int]) -> list[np.ndarray]:
        """Return the logprobs of `ids` at each position of each row, float32 [N, K]."""
        ...

    async def fit(
        self,
        rows: Sequence[TrainingRow],
        ids: Sequence[int],
        weights: Sequence[np.ndarray],
        optimizer: OptimizerConfig,
        learning_rate: float,
    ) -> dict[str, float]:
        """Take one optimizer step on the loss -sum(weights * logprobs); weights float32 [N, K] of each row."""
        ...

    async def save(self, name: str, ttl_seconds: int | None) -> str:
        """Save weights and optimizer. Returns the path of the checkpoint."""
        ...


class Trainer(Protocol):
    """A model in training.

    The version counts batches trained on, not optimizer steps: sampling only ever sees the weights after the last
    optimizer step of a batch, so that differences of versions are staleness in steps of the run.
    """

    @property
    def models(self) -> Models:
        """The session at the server: other models and checkpoints."""
        ...

    @property
    def version(self) -> int:
        """Number of batches trained on."""
        ...

    def set_version(self, version: int) -> None:
        """Set the version of weights that were loaded from a checkpoint."""
        ...

    async def snapshot(self) -> Snapshot:
        """Return the current weights for sampling."""
        ...

    async def accumulate(self, update: Update) -> UpdateResult:
        """Add the gradient of the rows to the gradient of the next optimizer step."""
        ...

    async def step(self, optimizer: OptimizerConfig, learning_rate: float) -> Mapping[str, float]:
        """Take one optimizer step with the accumulated gradient, which ends a batch; returns the server's metrics."""
        ...

    async def train(
        self, updates: Sequence[Update], optimizer: OptimizerConfig, learning_rate: float
    ) -> list[UpdateResult]:
        """Take one optimizer step for each of the updates of a batch, without waiting between them."""
        ...

    async def logprobs(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        """Return logprobs of the rows' targets by the weights in training, float32 [N] per row, by a forward pass."""
        ...

    async def entropies(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        """Return the entropy of the full distribution at each position, float32 [N] per row.

        Raises Unsupported if the server does not return entropies.
        """
        ...

    async def upload_loss(self, loss: Callable[..., Any]) -> str:
        """Upload the loss of a row, a function of `logprobs` and of inputs [N] by name, to a server that runs such
        losses. Returns its id, for `loss_id` of the loss `custom`; empty if the server does not run it."""
        return ""

    async def auxiliary_adapter(self, rank: int, seed: int, state: str = "") -> AuxiliaryAdapter:
        """Open a second adapter on the same base model, new or from the checkpoint `state`."""
        ...

    async def save(self, name: str, ttl_seconds: int | None, metadata: Mapping[str, str] | None = None) -> str:
        """Save weights and optimizer on the server. Returns the path of the checkpoint."""
        ...

    async def save_for_sampling(self, name: str, ttl_seconds: int | None = None) -> str:
        """Save the weights for sampling. Returns the path. Without `ttl_seconds` they do not expire."""
        ...
