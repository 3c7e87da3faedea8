"""The algorithm of a run: turns the groups of a step into training rows and the losses of its optimizer steps.

Steps of `score`: request the columns that the algorithm reads (reference, teacher, values), subtract the KL penalty
from rewards, compute advantages, write them into rows, merge identical rows, divide them into minibatches, drop rows
without gradient, and prepare the loss for the server or for the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tinsmith.errors import ConfigError
from tinsmith.imports import require_torch
from tinsmith.rl.algorithms import loss_dispatch
from tinsmith.rl.algorithms.advantages.base import Advantages, Trace, trace_from_trajectory, with_turn_returns
from tinsmith.rl.algorithms.advantages.per_token import GaeAdvantage
from tinsmith.rl.algorithms.config import AlgorithmConfig
from tinsmith.rl.algorithms.grouping import ComparisonGroup, advantages_by_role, comparison_groups
from tinsmith.rl.algorithms.losses.user_code import CustomLoss
from tinsmith.rl.algorithms.regularizers import divergence
from tinsmith.rl.algorithms.updates import BatchUpdates, Unit, UpdatesConfig, units_of_demonstrations
from tinsmith.rl.policy.trainer import Update, UpdateResult
from tinsmith.rl.policy.training_rows import (
    TEACHER_TOP,
    TrainingRow,
    gather_from_rows,
    is_truncated,
    merge_identical_rows,
    rows_from_trajectory,
    scatter_to_rows,
)
from tinsmith.rl.types import Group


def check_packages(
    config: AlgorithmConfig, updates: UpdatesConfig, extensions: frozenset[str] = loss_dispatch.EXTENSIONS
) -> None:
    """Raise ConfigError if the loss is computed here, by a server with these extensions, and PyTorch is missing."""
    if loss_dispatch.server_loss(config, extensions, anchored=_is_anchored(config, updates)) is None:
        loss = f"the server has no loss {config.loss.type} with these terms"
        require_torch(f"algorithm {config.type}: {loss}, and computing it here")


def uploadable(config: AlgorithmConfig, updates: UpdatesConfig) -> Callable[..., Any]:
    """The loss of a row that a server which runs uploaded losses can compute. Raises ValueError, which says why not."""
    return loss_dispatch.uploadable(config, anchored=_is_anchored(config, updates))


def _is_anchored(config: AlgorithmConfig, updates: UpdatesConfig) -> bool:
    return config.correction.enabled and updates.steps > 1


ColumnSource = Callable[[Sequence[TrainingRow]], Awaitable[list[np.ndarray]]]
"""Computes one column, float32 [N] for each row; TEACHER_TOP is [N, 2, K]."""


@dataclass(frozen=True, slots=True)
class _Reply:
    """A trajectory: the number of its comparison group, its rows, and its trace for advantages."""

    group: int
    rows: tuple[TrainingRow, ...]
    trace: Trace
    truncated: bool
    """Whether a turn reached max_tokens."""


class Algorithm:
    """Advantage, loss and terms of one configuration."""

    def __init__(
        self,
        config: AlgorithmConfig,
        extensions: frozenset[str],
        columns: Mapping[str, ColumnSource],
        seed: int,
        group_size: int = 1,
        updates: UpdatesConfig | None = None,
        uploaded: str = "",
    ) -> None:
        """`extensions`: loss inputs that the server adds to the Tinker API; `columns`: sources of `config.columns`;
        `group_size`: rollouts of a task; above 1, a trajectory without siblings is not trained on; `updates`: optimizer
        steps of a batch, one if not given; `uploaded`: id of the loss at the server, if it was uploaded.

        Raises ConfigError if the source of a column is missing, or if the loss is computed here without PyTorch.
        """
        self._updates = updates or UpdatesConfig()
        self._anchored = _is_anchored(config, self._updates)
        needed = config.columns | ({"proximal"} if self._anchored else set())
        if missing := sorted(needed - columns.keys()):
            raise ConfigError(f"algorithm: {config.type} reads {', '.join(missing)}, which no source provides.")
        self._config, self._columns, self._seed, self._group_size = config, columns, seed, group_size
        check_packages(config, self._updates, extensions)
        self._server_loss = loss_dispatch.server_loss(config, extensions, anchored=self._anchored, uploaded=uploaded)
        self._kl_coef, self._penalty_coef = config.kl.coef, config.kl_penalty.coef

    @property
    def loss_location(self) -> str:
        """Description of where the loss is computed, for display."""
        name = (
            self._config.loss.label.removeprefix("loss ")
            if isinstance(self._config.loss, CustomLoss)
            else self._config.loss.type
        )
        if self._server_loss is not None and self._server_loss.name == loss_dispatch.UPLOADED:
            return f"{name}, uploaded to the server"
        if self._server_loss is not None:
            anchor = ", relative to logprobs of one forward pass a batch" if self._anchored else ""
            return f"the server's {self._server_loss.name}{anchor}"
        return f"{name}, computed here, which costs one more forward pass a step"

    async def score(
        self, step: int, groups: Sequence[Group], demonstrations: Sequence[TrainingRow] = ()
    ) -> BatchUpdates:
        """The updates for the groups of a step and rows of demonstrations; none if there is no gradient."""
        units, numbers = await self._units(step, groups, demonstrations)
        if self._anchored:
            units = await self._with_anchors(units)
        divided = self._updates.divided(units, (self._seed, step))
        updates = [self._update(step, rows) for rows in divided]
        first_epoch = updates[: self._updates.minibatches]
        return BatchUpdates(
            updates=tuple(update for update in updates if update.rows),
            rows=tuple(row for update in first_epoch for row in update.rows),
            numbers=numbers,
        )

    async def score_part(
        self, step: int, groups: Sequence[Group], demonstrations: Sequence[TrainingRow] = ()
    ) -> Update:
        """The update for some groups of a step; without rows if there is no gradient.

        The gradients of parts add up to that of the whole step for algorithms without `stream_fault`, and only for
        these; for any algorithm, a step may have one part.
        """
        units, numbers = await self._units(step, groups, demonstrations)
        return replace(self._update(step, [row for unit in units for row in unit.rows]), numbers=numbers)

    async def _units(
        self, step: int, groups: Sequence[Group], demonstrations: Sequence[TrainingRow]
    ) -> tuple[list[Unit], dict[str, float]]:
        """The rows with their advantages, by group, and metrics."""
        config = self._config
        numbered = [
            (number, compared)
            for number, group in enumerate(groups)
            for compared in comparison_groups([group], config.grouping)
            if config.trains(compared.role)
        ]
        compared = [group for _, group in numbered]
        replies = [
            _Reply(
                number, tuple(rows_from_trajectory(each)), trace_from_trajectory(each, group.task), is_truncated(each)
            )
            for number, group in enumerate(compared)
            for each in group.trajectories
        ]
        replies, numbers = self._with_penalty(await self._with_columns(replies))
        random = np.random.default_rng((self._seed, step))
        traces_PG = [[reply.trace for reply in replies if reply.group == number] for number in range(len(compared))]
        if config.turn_discount:
            traces_PG = [[with_turn_returns(trace, config.turn_discount) for trace in group] for group in traces_PG]
        replies = self._with_returns(replies)
        advantages_PG = advantages_by_role(
            compared, traces_PG, config.advantage_of, config.grouping, self._group_size, random
        )
        rows_P = self._rows(replies, advantages_PG, random)
        if self._config.loss_reads_reference and demonstrations:
            columns = await self._columns["reference"](demonstrations)
            demonstrations = [
                replace(row, columns={"reference": column}) for row, column in zip(demonstrations, columns, strict=True)
            ]
        return [*_units_of_groups(numbered, rows_P), *units_of_demonstrations(demonstrations)], {
            **numbers,
            **_row_breaks(replies),
        }

    async def _with_anchors(self, units: Sequence[Unit]) -> list[Unit]:
        """The units with the column `proximal`: the logprobs of the weights in training, before the first update."""
        rows = [row for unit in units if not unit.demonstration for row in unit.rows]
        columns = iter(await self._columns["proximal"](rows) if rows else ())
        return [
            unit
            if unit.demonstration
            else replace(
                unit,
                rows=tuple(replace(row, columns={**row.columns, "proximal": next(columns)}) for row in unit.rows),
            )
            for unit in units
        ]

    def adapt_coefficients(
        self, results: Sequence[tuple[Update, UpdateResult]], rows: Sequence[TrainingRow], numbers: Mapping[str, float]
    ) -> dict[str, float]:
        """Move adaptive coefficients by the mean divergence of the updates of a step. Returns them as metrics.

        `rows`: those of the step, each once; `numbers`: metrics of the algorithm in this step.
        """
        replies = sum(row.count for row in rows)
        adapted: dict[str, float] = {}
        if (measured := _mean_divergence(results)) is not None:
            self._kl_coef = self._config.kl.adapted_coef(self._kl_coef, measured, replies)
            adapted = {"optim/kl": measured, "optim/kl_coef": self._kl_coef}
        if (penalty := numbers.get("reward/kl")) is not None:
            self._penalty_coef = self._config.kl_penalty.adapted_coef(self._penalty_coef, penalty, replies)
            adapted["reward/kl_coef"] = self._penalty_coef
        return adapted

    @property
    def state(self) -> dict[str, float]:
        """Adaptive coefficients, to be saved in a checkpoint."""
        return {"kl_coef": self._kl_coef, "kl_penalty_coef": self._penalty_coef}

    def restore(self, state: Mapping[str, float]) -> None:
        """Set the coefficients to those of `state`."""
        self._kl_coef = state.get("kl_coef", self._kl_coef)
        self._penalty_coef = state.get("kl_penalty_coef", self._penalty_coef)

    async def _with_columns(self, replies: Sequence[_Reply]) -> list[_Reply]:
        """The replies with the columns that the algorithm reads, in rows and traces."""
        names = sorted(self._config.columns)
        rows = [row for reply in replies for row in reply.rows]
        if not names or not rows:
            return list(replies)
        sources = await asyncio.gather(*(self._columns[name](rows) for name in names))
        extended: list[_Reply] = []
        begin = 0
        for reply in replies:
            end = begin + len(reply.rows)
            columns = {name: source[begin:end] for name, source in zip(names, sources, strict=True)}
            begin = end
            reply_rows = tuple(
                replace(row, columns={name: column[at] for name, column in columns.items()})
                for at, row in enumerate(reply.rows)
            )
            of_tokens = {name: column for name, column in columns.items() if name != TEACHER_TOP}
            trace_columns = {name: gather_from_rows(reply.rows, column) for name, column in of_tokens.items()}
            extended.append(replace(reply, rows=reply_rows, trace=reply.trace.with_columns(trace_columns)))
        return extended

    def _with_penalty(self, replies: Sequence[_Reply]) -> tuple[list[_Reply], dict[str, float]]:
        """The replies with the KL penalty of each token (sampler against reference), and its mean as a metric."""
        if not self._config.kl_penalty.enabled:
            return list(replies), {}
        penalized, divergences = [], [np.zeros(0)]
        for reply in replies:
            old, reference = reply.trace.logprobs, reply.trace.columns["reference"]
            divergence_T = divergence(self._config.kl_penalty.type, old, old, reference)
            divergences.append(divergence_T)
            penalized.append(replace(reply, trace=replace(reply.trace, penalty=self._penalty_coef * divergence_T)))
        all_tokens = np.concatenate(divergences)
        return penalized, {"reward/kl": float(all_tokens.mean()) if len(all_tokens) else 0.0}

    def _with_returns(self, replies: Sequence[_Reply]) -> list[_Reply]:
        """The replies with the returns that the critic learns: advantages before whitening, plus values."""
        gae = self._config.advantage
        if not isinstance(gae, GaeAdvantage):
            return list(replies)
        extended = []
        for reply in replies:
            values_T = reply.trace.columns["values"]
            columns = scatter_to_rows(reply.rows, gae.raw(reply.trace.token_rewards, values_T) + values_T)
            rows = [
                replace(row, columns={**row.columns, "returns": column})
                for row, column in zip(reply.rows, columns, strict=True)
            ]
            extended.append(replace(reply, rows=tuple(rows)))
        return extended

    def _rows(
        self, replies: Sequence[_Reply], advantages_PG: Advantages, random: np.random.Generator
    ) -> list[list[TrainingRow]]:
        """The rows to train on of each group, with their advantages: dropped replies refilled, identical rows merged.

        With `refill`, all rows are in one list, because copies merge with the originals of their groups.
        """
        rows_PG: list[list[list[TrainingRow]]] = []
        dropped = 0
        for number, advantages_G in enumerate(advantages_PG):
            group = [reply for reply in replies if reply.group == number]
            dropped += len(group) if not advantages_G else 0
            rows_PG.append(
                [
                    [
                        replace(row, advantages=column)
                        for row, column in zip(reply.rows, scatter_to_rows(reply.rows, advantages_T), strict=True)
                    ]
                    for reply, advantages_T in zip(group, advantages_G, strict=False)
                    if len(advantages_T) and not (reply.truncated and self._config.mask_truncated)
                ]
            )
        if self._config.refill and (pool := [rows for rows_G in rows_PG for rows in rows_G]):
            rows_PG.append([pool[int(at)] for at in random.integers(len(pool), size=dropped)])
        by_group = [[row for rows in rows_G for row in rows] for rows_G in rows_PG]
        if self._config.refill:
            by_group = [[row for rows in by_group for row in rows]]
        if self._config.merges_rows:
            by_group = [merge_identical_rows(rows, self._config.advantage_kink) for rows in by_group]
        return by_group

    def _update(self, step: int, rows: Sequence[TrainingRow]) -> Update:
        """The update for the rows. Weights of the aggregate count all rows, including those without gradient."""
        if not rows:
            return Update(rows=())
        batch = loss_dispatch.tokens_of_rows(rows, self._config, step)
        if self._config.drop_zero_advantage:
            nonzero = np.array([row.advantages.any() for row in rows], bool)
            batch = batch.select_rows(nonzero)
            rows = [row for row, selected in zip(rows, nonzero, strict=True) if selected]
        if not rows:
            return Update(rows=())
        context = loss_dispatch.LossContext(step=step, kl_coef=self._kl_coef)
        if self._server_loss is None:
            return loss_dispatch.update_by_client(rows, batch, self._config, context)
        return loss_dispatch.update_by_server(rows, batch, self._config, context, self._server_loss)


def _units_of_groups(
    numbered: Sequence[tuple[int, ComparisonGroup]], rows_P: Sequence[Sequence[TrainingRow]]
) -> list[Unit]:
    """One unit for each group of the step, from the rows of its comparison groups."""
    if len(rows_P) != len(numbered):  # refilled
        return [Unit(rows=tuple(row for rows in rows_P for row in rows))]
    units: dict[int, list[TrainingRow]] = {}
    for (number, _), rows in zip(numbered, rows_P, strict=True):
        units.setdefault(number, []).extend(rows)
    return [Unit(rows=tuple(rows)) for rows in units.values()]


def _mean_divergence(results: Sequence[tuple[Update, UpdateResult]]) -> float | None:
    """Mean divergence from the reference in the losses of updates, over all tokens; None if they have none."""
    total = weight = 0.0
    for update, result in results:
        if "kl" in result.metrics:
            tokens = sum(
                row.count * int(row.mask.sum()) for row in update.rows if row.kind not in ("expert", "mismatched")
            )
            total, weight = total + result.metrics["kl"] * tokens, weight + tokens
        elif "kl:sum" in result.metrics:
            total += result.metrics["kl:sum"]
            weight += sum(float(inputs["kl_mask"].sum()) for inputs in update.inputs)
    if not any({"kl", "kl:sum"} & result.metrics.keys() for _, result in results):
        return None
    return total / weight if weight else 0.0


def _row_breaks(replies: Sequence[_Reply]) -> dict[str, float]:
    """Turns that do not extend the turn before them token by token, and so begin a training row of their own."""
    multi_turn = [reply for reply in replies if len(reply.trace.turns) > 1]
    return {"rows/breaks": float(sum(len(reply.rows) - 1 for reply in multi_turn))} if multi_turn else {}
