"""How a batch becomes optimizer steps: minibatches, epochs, and gradients that are streamed in parts.

A minibatch consists of whole groups, with all their replies. Advantages are computed over the batch before it is
divided; the weights of the aggregate are those of the minibatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np
from pydantic import Field, model_validator

from tinsmith.rl.policy.trainer import Update
from tinsmith.rl.policy.training_rows import TrainingRow
from tinsmith.settings import Needs, Settings


class UpdatesConfig(Settings):
    """Optimizer steps of each batch. The batch of a step is divided by groups: docs/train/steps.md."""

    minibatches: int = Field(default=1, ge=1)
    """Minibatches of a batch, each with an optimizer step of its own. They have equally many groups, or one more."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the minibatches of a batch."""
    shuffle: Annotated[bool, Needs("minibatches", unless=(1,), hint="set minibatches")] = False
    """Draw the groups of the minibatches at random in each epoch, in place of consecutive ones."""
    stream: int = Field(default=1, ge=1)
    """Compute the gradient of a batch in this many parts, each as soon as its groups are sampled, with one optimizer
    step after the last. The gradient is the same; algorithms for which it would not be are refused."""

    @model_validator(mode="after")
    def _check_stream(self) -> UpdatesConfig:
        if self.stream > 1 and self.steps > 1:
            raise ValueError("stream is not used with minibatches or epochs above 1; leave out one of them")
        return self

    @property
    def steps(self) -> int:
        """Optimizer steps of a batch."""
        return self.minibatches * self.epochs

    def divided(self, units: Sequence[Unit], seed: tuple[int, int]) -> Iterator[list[TrainingRow]]:
        """The rows of each optimizer step, in order; `units` stay whole, and each minibatch gets as many
        demonstrations."""
        for epoch in range(self.epochs):
            parts: list[list[TrainingRow]] = [[] for _ in range(self.minibatches)]
            random = np.random.default_rng((*seed, epoch))
            for demonstrations in (False, True):
                of_kind = [unit for unit in units if unit.demonstration == demonstrations]
                order = random.permutation(len(of_kind)) if self.shuffle else np.arange(len(of_kind))
                for part, places in zip(parts, np.array_split(order, self.minibatches), strict=True):
                    part += [row for place in places for row in of_kind[int(place)].rows]
            yield from parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Rows that stay in one minibatch: those of a group, or those of a demonstration or a pair."""

    rows: tuple[TrainingRow, ...]
    demonstration: bool = False


def units_of_demonstrations(rows: Sequence[TrainingRow]) -> list[Unit]:
    """One unit for each demonstration; a reply and the rows that follow it, of its pair or after other prompts, are one
    unit."""
    units: list[Unit] = []
    for row in rows:
        if row.kind in ("rejected", "mismatched"):
            units[-1] = replace(units[-1], rows=(*units[-1].rows, row))
        else:
            units.append(Unit(rows=(row,), demonstration=True))
    return units


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchUpdates:
    """The updates of a batch, one for each optimizer step, in order.

    Minibatches without a gradient have none.
    """

    updates: tuple[Update, ...] = ()
    rows: tuple[TrainingRow, ...] = ()
    """The rows of the first epoch: each row of the batch that has a gradient."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the algorithm."""
