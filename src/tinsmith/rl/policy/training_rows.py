"""Rollouts become the rows that are trained on.

Turns that extend each other (the next prompt begins with the last prompt and reply, token by token) share one row; a
turn that does not begins a new one. Positions that the policy did not speak are outside of the mask, with logprob and
advantage 0. A number for each of the policy's tokens goes into rows by `placed` and comes back by `gathered`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import tinker

from tinsmith.rl.types import POLICY, Rollout

Kind = Literal["policy", "expert", "chosen", "rejected"]
"""Author of the tokens inside the mask: the policy, an expert, or one reply of a pair."""


_NOISE = 1e-3
"""Tolerance between logprobs of the same policy for the same reply: rounding depends on the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """One row: position i of `tokens` predicts `targets[i]`.

    Example: prompt 5 6 and reply 7 2 with advantage 0.5 are tokens=[5, 6, 7], targets=[6, 7, 2],
    logprobs=[0, -0.9, -0.1], advantages=[0, 0.5, 0.5], mask=[False, True, True].
    """

    tokens: np.ndarray
    """int64 [N]."""
    targets: np.ndarray
    """int64 [N]."""
    logprobs: np.ndarray
    """float32 [N] of the sampler; 0 for words that no sampler spoke."""
    advantages: np.ndarray
    """float32 [N]."""
    mask: np.ndarray
    """bool [N]: tokens to learn."""
    count: int = 1
    """Replies that this row stands for."""
    kind: Kind = "policy"
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """float32 [N] by name: logprobs of other models for the same tokens, such as `reference`."""

    @property
    def sequence(self) -> list[int]:
        """All N + 1 token ids."""
        return [*self.tokens.tolist(), *self.targets[-1:].tolist()]

    def datum(self, inputs: Mapping[str, np.ndarray]) -> tinker.Datum:
        """Return the row as an SDK datum, with the inputs that the loss reads."""
        arrays = {"target_tokens": self.targets, **inputs}
        return tinker.Datum(
            model_input=tinker.ModelInput.from_ints(self.tokens.tolist()),
            loss_fn_inputs={name: tinker.TensorData.from_numpy(values) for name, values in arrays.items()},
        )


def rows_from_rollout(rollout: Rollout) -> list[TrainingRow]:
    """The rows of a rollout, with no advantages yet; in order, their masks together are the policy's tokens."""
    rows: list[_Row] = []
    for turn in rollout.turns:
        if turn.role != POLICY:
            continue
        prompt = list(turn.prompt)
        if not rows or prompt[: len(rows[-1].tokens)] != rows[-1].tokens:
            rows.append(_Row([], [], []))
        fresh = prompt[len(rows[-1].tokens) :]
        rows[-1].add(fresh, [0.0] * len(fresh), False)
        rows[-1].add(turn.tokens, turn.logprobs, True)
    return [row.sample() for row in rows]


def scatter_to_rows(rows: Sequence[TrainingRow], values_T: np.ndarray) -> list[np.ndarray]:
    """A number for each of T tokens inside the rows' masks as a column of each row: float32 [N], 0 outside."""
    columns, begin = [], 0
    for row in rows:
        end = begin + int(row.mask.sum())
        column = np.zeros(len(row.mask), np.float32)
        column[row.mask] = values_T[begin:end]
        columns.append(column)
        begin = end
    return columns


def gather_from_rows(rows: Sequence[TrainingRow], columns: Sequence[np.ndarray]) -> np.ndarray:
    """Return the values inside the rows' masks, concatenated, float64 [T]."""
    pieces = [column[row.mask].astype(np.float64) for row, column in zip(rows, columns, strict=True)]
    return np.concatenate([np.zeros(0), *pieces])


def merge_identical_rows(rows: Sequence[TrainingRow], advantage_kink: float | None = None) -> list[TrainingRow]:
    """Merge rows with equal tokens: sum their advantages, and take everything else from the first of them.

    `advantage_kink` is the advantage at which the gradient of the loss changes; rows on different sides of it are not
    merged.
    """
    merged_rows: list[TrainingRow] = []
    places: dict[bytes, list[int]] = {}
    for row in rows:
        key = row.tokens.tobytes() + row.targets[-1:].tobytes() + row.mask.tobytes()
        twins = places.setdefault(key, [])
        for at in twins:
            if (merged := _merged(merged_rows[at], row, advantage_kink)) is not None:
                merged_rows[at] = merged
                break
        else:
            twins.append(len(merged_rows))
            merged_rows.append(row)
    return merged_rows


def _merged(first: TrainingRow, second: TrainingRow, advantage_kink: float | None) -> TrainingRow | None:
    """Return the sum of two rows; None if their logprobs differ, or the merge would cross the kink."""
    advantages = first.advantages + second.advantages
    if np.abs(first.logprobs - second.logprobs).max(initial=0.0) > _NOISE:
        return None
    if advantage_kink is not None:
        above = first.advantages > advantage_kink
        if (above != (second.advantages > advantage_kink)).any() or (above != (advantages > advantage_kink)).any():
            return None
    return replace(first, advantages=advantages, count=first.count + second.count)


def count_policy_tokens(rollout: Rollout) -> int:
    """How many tokens of it the policy spoke."""
    return sum(len(turn.tokens) for turn in rollout.turns if turn.role == POLICY)


def is_truncated(rollout: Rollout) -> bool:
    """Whether a turn of the policy met max_tokens."""
    return any(turn.stop == "length" for turn in rollout.turns if turn.role == POLICY)


@dataclass(slots=True)
class _Row:
    tokens: list[int]
    logprobs: list[float]
    mask: list[bool]

    def add(self, tokens: Sequence[int], logprobs: Sequence[float], mask: bool) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.mask += [mask] * len(tokens)

    def sample(self) -> TrainingRow:
        return TrainingRow(
            tokens=np.array(self.tokens[:-1], np.int64),
            targets=np.array(self.tokens[1:], np.int64),
            logprobs=np.array(self.logprobs[1:], np.float32),
            advantages=np.zeros(len(self.tokens) - 1, np.float32),
            mask=np.array(self.mask[1:], bool),
        )
