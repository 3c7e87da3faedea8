"""The algorithm of a run at work: groups in, rows and one loss over them out.

In order: ask what is needed (reference, teacher, values), take penalties off rewards, compute advantages, lay them on
rows, let equal replies share a row, leave out what teaches nothing, and have the loss computed where it can be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tinsmith.errors import ConfigError
from tinsmith.rl.algorithms import loss_dispatch
from tinsmith.rl.algorithms.advantages.base import Advantages, Trace, trace_from_rollout
from tinsmith.rl.algorithms.advantages.per_token import GaeAdvantage
from tinsmith.rl.algorithms.config import AlgorithmConfig
from tinsmith.rl.algorithms.regularizers import divergence
from tinsmith.rl.policy.base import Update, UpdateResult
from tinsmith.rl.policy.training_rows import (
    TrainingRow,
    gather_from_rows,
    is_truncated,
    merge_identical_rows,
    rows_from_rollout,
    scatter_to_rows,
)
from tinsmith.rl.types import Group

ColumnSource = Callable[[Sequence[TrainingRow]], Awaitable[list[np.ndarray]]]
"""From rows to a column [N] of each."""


@dataclass(frozen=True, slots=True)
class _Reply:
    """A rollout that did not fail: its group's number, its rows, and what advantages see of it."""

    group: int
    rows: tuple[TrainingRow, ...]
    trace: Trace
    cut: bool
    """Whether a turn of it met max_tokens."""


class Algorithm:
    """Advantage, loss and terms of one configuration."""

    def __init__(
        self, config: AlgorithmConfig, extensions: frozenset[str], columns: Mapping[str, ColumnSource], seed: int
    ) -> None:
        """`extensions` are the server's; `columns` has whom to ask for each name in `config.columns`."""
        if missing := sorted(config.columns - columns.keys()):
            raise ConfigError(f"algorithm: {config.type} reads {', '.join(missing)}, and nobody here gives it.")
        self._config, self._columns, self._seed = config, columns, seed
        self._served = loss_dispatch.server_loss(config, extensions)
        self._kl_coef, self._penalty_coef = config.kl.coef, config.kl_penalty.coef

    @property
    def loss_location(self) -> str:
        """Who computes the loss, for people."""
        if self._served is not None:
            return f"the server's {self._served.name}"
        return f"{self._config.loss.type}, computed here, which costs one more forward pass a step"

    async def score(self, step: int, groups: Sequence[Group], demonstrations: Sequence[TrainingRow] = ()) -> Update:
        """What to learn from a step's groups and from rows of others beside them; no rows: nothing."""
        replies = [
            _Reply(number, tuple(rows_from_rollout(rollout)), trace_from_rollout(rollout), is_truncated(rollout))
            for number, group in enumerate(groups)
            for rollout in group.rollouts
            if not rollout.error
        ]
        replies, numbers = self._penalized(await self._asked(replies))
        random = np.random.default_rng((self._seed, step))
        traces_PG = [[one.trace for one in replies if one.group == number] for number in range(len(groups))]
        replies = self._with_returns(replies)
        rows = self._rows(replies, self._config.advantage.compute(traces_PG, random), random)
        if self._config.loss_reads_reference and demonstrations:
            columns = await self._columns["reference"](demonstrations)
            demonstrations = [
                replace(row, columns={"reference": column}) for row, column in zip(demonstrations, columns, strict=True)
            ]
        return replace(self._update(step, [*rows, *demonstrations]), numbers=numbers)

    def adapt_coefficients(self, update: Update, updated: UpdateResult) -> dict[str, float]:
        """Coefficients that adapt move by what the update measured; what they are now."""
        replies = sum(row.count for row in update.rows)
        measured = updated.metrics.get("kl")
        if measured is None and "kl:sum" in updated.metrics:
            weight = sum(float(inputs["kl_mask"].sum()) for inputs in update.inputs)
            measured = updated.metrics["kl:sum"] / weight if weight else 0.0
        numbers: dict[str, float] = {}
        if measured is not None:
            self._kl_coef = self._config.kl.adapted_coef(self._kl_coef, measured, replies)
            numbers = {"optim/kl": measured, "optim/kl_coef": self._kl_coef}
        if (penalty := update.numbers.get("reward/kl")) is not None:
            self._penalty_coef = self._config.kl_penalty.adapted_coef(self._penalty_coef, penalty, replies)
            numbers["reward/kl_coef"] = self._penalty_coef
        return numbers

    @property
    def state(self) -> dict[str, float]:
        """What a run that goes on must know."""
        return {"kl_coef": self._kl_coef, "kl_penalty_coef": self._penalty_coef}

    def restore(self, state: Mapping[str, float]) -> None:
        """As it was."""
        self._kl_coef = state.get("kl_coef", self._kl_coef)
        self._penalty_coef = state.get("kl_penalty_coef", self._penalty_coef)

    async def _asked(self, replies: Sequence[_Reply]) -> list[_Reply]:
        """With every column that is read."""
        names = sorted(self._config.columns)
        rows = [row for one in replies for row in one.rows]
        if not names or not rows:
            return list(replies)
        answers = await asyncio.gather(*(self._columns[name](rows) for name in names))
        found: list[_Reply] = []
        begin = 0
        for one in replies:
            mine = {name: answer[begin : begin + len(one.rows)] for name, answer in zip(names, answers, strict=True)}
            begin += len(one.rows)
            filled = tuple(
                replace(row, columns={name: columns[at] for name, columns in mine.items()})
                for at, row in enumerate(one.rows)
            )
            known = {name: gather_from_rows(one.rows, columns) for name, columns in mine.items()}
            found.append(replace(one, rows=filled, trace=one.trace.with_columns(known)))
        return found

    def _penalized(self, replies: Sequence[_Reply]) -> tuple[list[_Reply], dict[str, float]]:
        """With the divergence of the sampler from the reference taken off the reward, token by token."""
        if not self._config.kl_penalty.enabled:
            return list(replies), {}
        found, values = [], [np.zeros(0)]
        for one in replies:
            old, reference = torch.from_numpy(one.trace.logprobs), torch.from_numpy(one.trace.columns["reference"])
            value = divergence(self._config.kl_penalty.type, old, old, reference).numpy()
            values.append(value)
            found.append(replace(one, trace=replace(one.trace, penalty=self._penalty_coef * value)))
        together = np.concatenate(values)
        return found, {"reward/kl": float(together.mean()) if len(together) else 0.0}

    def _with_returns(self, replies: Sequence[_Reply]) -> list[_Reply]:
        """With what a critic is to learn: advantages that nobody whitened, and the values that they were taken from."""
        gae = self._config.advantage
        if not isinstance(gae, GaeAdvantage):
            return list(replies)
        found = []
        for one in replies:
            values_T = one.trace.columns["values"]
            columns = scatter_to_rows(one.rows, gae.raw(one.trace.token_rewards, values_T) + values_T)
            rows = [
                replace(row, columns={**row.columns, "returns": column})
                for row, column in zip(one.rows, columns, strict=True)
            ]
            found.append(replace(one, rows=tuple(rows)))
        return found

    def _rows(
        self, replies: Sequence[_Reply], advantages_PG: Advantages, random: np.random.Generator
    ) -> list[TrainingRow]:
        """Every kept reply's rows with their advantages."""
        kept: list[list[list[TrainingRow]]] = []
        dropped = 0
        for number, advantages_G in enumerate(advantages_PG):
            mine = [one for one in replies if one.group == number]
            dropped += len(mine) if not advantages_G else 0
            kept.append(
                [
                    [
                        replace(row, advantages=column)
                        for row, column in zip(one.rows, scatter_to_rows(one.rows, values), strict=True)
                    ]
                    for one, values in zip(mine, advantages_G, strict=False)
                    if len(values) and not (one.cut and self._config.mask_truncated)
                ]
            )
        if self._config.refill and (pool := [rows for rows_G in kept for rows in rows_G]):
            kept.append([pool[int(at)] for at in random.integers(len(pool), size=dropped)])
        if not self._config.merges_rows:
            return [row for rows_G in kept for rows in rows_G for row in rows]
        advantage_kink = self._config.loss.advantage_kink
        if self._config.refill:
            return merge_identical_rows([row for rows_G in kept for rows in rows_G for row in rows], advantage_kink)
        return [
            row
            for rows_G in kept
            for row in merge_identical_rows([row for rows in rows_G for row in rows], advantage_kink)
        ]

    def _update(self, step: int, rows: Sequence[TrainingRow]) -> Update:
        """Weights are those among all rows, also when those that teach nothing are left out."""
        if not rows:
            return Update(rows=())
        batch = loss_dispatch.tokens_of_rows(rows, self._config, step)
        if self._config.drop_zero_advantage:
            loud = [bool(row.advantages.any()) for row in rows]
            batch, rows = (
                batch.select_rows(torch.tensor(loud)),
                [row for row, one in zip(rows, loud, strict=True) if one],
            )
        if not rows:
            return Update(rows=())
        context = loss_dispatch.LossContext(step=step, kl_coef=self._kl_coef)
        if self._served is None:
            return loss_dispatch.update_by_client(rows, batch, self._config, context)
        return loss_dispatch.update_by_server(rows, batch, self._config, context, self._served)
