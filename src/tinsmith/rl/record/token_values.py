"""What training made of each sampled token, for the records of rollouts: its advantage, and the trainer's logprob.

The logprobs are those before the first optimizer step that trained on the token. Identical replies of a group are one
training row: the advantage of each is their mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tinsmith.rl.policy.trainer import Update, UpdateResult
from tinsmith.rl.policy.training_rows import TrainingRow, gather_from_rows, rows_from_trajectory, trained_turns
from tinsmith.rl.types import Group, Rollout, Trajectory, Turn

_DIGITS = 6

Results = Sequence[tuple[Update, UpdateResult]]
_Values = dict[bytes, tuple[np.ndarray, np.ndarray]]


def with_token_values(groups: Sequence[Group], results: Results) -> tuple[Group, ...]:
    """The groups, where turns that were trained on have their `advantages` and `trainer_logprobs`."""
    values: _Values = {}
    for update, result in results:
        for row, logprobs in zip(update.rows, result.logprobs, strict=True):
            if row.kind == "policy":
                values.setdefault(_key(row), (row.advantages / row.count, logprobs))
    return tuple(_group(group, values) for group in groups) if values else tuple(groups)


def _key(row: TrainingRow) -> bytes:
    return row.tokens.tobytes() + row.targets[-1:].tobytes() + row.mask.tobytes()


def _group(group: Group, values: _Values) -> Group:
    return replace(group, rollouts=tuple(_rollout(rollout, values) for rollout in group.rollouts))


def _rollout(rollout: Rollout, values: _Values) -> Rollout:
    if rollout.error:
        return rollout
    return replace(rollout, trajectories=tuple(_trajectory(each, values) for each in rollout.trajectories))


def _trajectory(trajectory: Trajectory, values: _Values) -> Trajectory:
    """The trajectory with the values of its rows; rows without a gradient have none."""
    rows = rows_from_trajectory(trajectory)
    of_rows = [values.get(_key(row)) for row in rows]
    if not any(of_rows):
        return trajectory
    unknown = [np.full(len(row.mask), np.nan, np.float32) for row in rows]
    pairs = [pair or (each, each) for pair, each in zip(of_rows, unknown, strict=True)]
    advantages_T = gather_from_rows(rows, [advantages for advantages, _ in pairs])
    logprobs_T = gather_from_rows(rows, [logprobs for _, logprobs in pairs])
    turns, begin = [], 0
    trained = {id(turn) for turn in trained_turns(trajectory)}
    for turn in trajectory.turns:
        end = begin + len(turn.tokens) if id(turn) in trained else begin
        turns.append(_turn(turn, advantages_T[begin:end], logprobs_T[begin:end]))
        begin = end
    return replace(trajectory, turns=tuple(turns))


def _turn(turn: Turn, advantages_L: np.ndarray, logprobs_L: np.ndarray) -> Turn:
    if not len(advantages_L) or np.isnan(advantages_L).all():
        return turn
    advantages = tuple(np.round(advantages_L, _DIGITS).tolist())
    return replace(
        turn,
        advantages=advantages[0] if len(set(advantages)) == 1 else advantages,
        trainer_logprobs=tuple(np.round(logprobs_L, _DIGITS).tolist()),
    )
