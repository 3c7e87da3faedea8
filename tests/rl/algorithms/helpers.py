"""Column sources for tests of algorithms, and a runner of coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

import numpy as np

from tinsmith.rl.algorithms.algorithm import ColumnSource
from tinsmith.rl.policy.training_rows import TEACHER_TOP, TrainingRow

T = TypeVar("T")


def columns(shift: float = -0.1) -> dict[str, ColumnSource]:
    """Sources of every column: the sampler's logprobs plus `shift` for each sampled token."""

    async def ask(rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        return [np.where(row.mask, row.logprobs + shift, 0.0).astype(np.float32) for row in rows]

    async def likeliest(rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        return [np.stack([np.full((len(row.mask), 2), [5, 6]), np.full((len(row.mask), 2), -1.0)], 1) for row in rows]

    return {**dict.fromkeys(("reference", "teacher", "values", "entropy"), ask), TEACHER_TOP: likeliest}


def run(work: Awaitable[T]) -> T:
    """Run an awaitable in a new event loop and return its result."""

    async def main() -> T:
        return await work

    return asyncio.run(main())
