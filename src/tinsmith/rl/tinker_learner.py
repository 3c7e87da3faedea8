"""A second adapter on a server of the Tinker API, that is asked for and taught K tokens at every position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import tinker

from tinsmith.rl.optimizer import OptimizerConfig
from tinsmith.rl.samples import Sample
from tinsmith.rl.sdk import adam, boundary


class TinkerLearner:
    """Implements `policy.Learner`."""

    def __init__(self, client: tinker.TrainingClient, vocabulary: int) -> None:
        self._client, self._vocabulary = client, vocabulary

    @property
    def vocabulary(self) -> int:
        """The tokenizer's."""
        return self._vocabulary

    async def logprobs(self, rows: Sequence[Sample], ids: Sequence[int]) -> list[np.ndarray]:
        """One forward pass."""
        data = [_datum(row, ids, np.ones((len(row.tokens), len(ids)), np.float32)) for row in rows]
        async with boundary("asking the critic"):
            passed = await self._client.forward(data, "cross_entropy")
        return [np.asarray(one["logprobs"].to_numpy(), np.float32) for one in passed.loss_fn_outputs]

    async def fit(
        self,
        rows: Sequence[Sample],
        ids: Sequence[int],
        weights: Sequence[np.ndarray],
        optimizer: OptimizerConfig,
        learning_rate: float,
    ) -> dict[str, float]:
        """One gradient and one step, submitted together."""
        data = [_datum(row, ids, one) for row, one in zip(rows, weights, strict=True)]
        async with boundary("teaching the critic"):
            gradient = self._client.forward_backward(data, "cross_entropy")
            step = self._client.optim_step(adam(optimizer, learning_rate))
            passed, stepped = await gradient, await step
        return {**passed.metrics, **(stepped.metrics or {})}

    async def save(self, name: str, ttl_seconds: int | None) -> str:
        """A state checkpoint."""
        async with boundary(f"saving the critic {name}"):
            return (await self._client.save_state(name, ttl_seconds=ttl_seconds, overwrite=True)).path


def _datum(row: Sample, ids: Sequence[int], weights_NK: np.ndarray) -> tinker.Datum:
    targets_NK = np.tile(np.asarray(ids, np.int64), (len(row.tokens), 1))
    arrays: dict[str, Any] = {"target_tokens": targets_NK, "weights": weights_NK}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(row.tokens.tolist()),
        loss_fn_inputs=cast(Any, {name: tinker.TensorData.from_numpy(values) for name, values in arrays.items()}),
    )
