"""Whom algorithms ask, in tests: each answers with the sampler's logprobs, shifted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

import numpy as np

from tinsmith.rl.algorithms import ColumnSource
from tinsmith.rl.policy.training_rows import TrainingRow

T = TypeVar("T")


def columns(shift: float = -0.1) -> dict[str, ColumnSource]:
    async def ask(rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        return [np.where(row.mask, row.logprobs + shift, 0.0).astype(np.float32) for row in rows]

    return dict.fromkeys(("reference", "teacher", "values", "entropy"), ask)


def run(work: Awaitable[T]) -> T:
    async def main() -> T:
        return await work

    return asyncio.run(main())
