"""Convert trajectories to training rows.

Turns that extend each other (the next prompt begins with the previous prompt and reply, token by token) share a row;
other turns begin a new row. Tokens that the policy did not sample are outside the mask, with logprob and advantage 0.
`scatter_to_rows` and `gather_from_rows` convert between values per policy token and columns of rows.

Dimensions: N positions of a row, T tokens inside the masks of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from tinsmith.rl.types import EncodedPrompt, PlacedImage, Tokens, Trajectory, Turn
from tinsmith.routed_experts import from_text, missing

Kind = Literal["policy", "expert", "chosen", "rejected", "desirable", "undesirable", "mismatched"]
"""Source of the tokens inside the mask: the policy, a demonstration (`expert`), one reply of a pair, a reply with a
label, or a reply after the prompt of another one."""


TEACHER_TOP = "teacher_top"
"""Column [N, 2, K]: the teacher's likeliest tokens in place of the targets, and their logprobs. float64 holds both."""

_LOGPROB_TOLERANCE = 1e-3
"""Tolerance for logprobs of the same reply and policy: rounding on the server depends on the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """A training sequence: position i of `tokens` predicts `targets[i]`.

    Example: prompt 5 6 and reply 7 2 with advantage 0.5 are tokens=[5, 6, 7], targets=[6, 7, 2],
    logprobs=[0, -0.9, -0.1], advantages=[0, 0.5, 0.5], mask=[False, True, True].
    """

    tokens: np.ndarray
    """int64 [N]: input token ids."""
    targets: np.ndarray
    """int64 [N]: next token ids."""
    logprobs: np.ndarray
    """float32 [N]: logprobs of the targets under the sampling policy; 0 for tokens that it did not sample."""
    advantages: np.ndarray
    """float32 [N]: advantages of the targets."""
    mask: np.ndarray
    """bool [N]: targets to train on."""
    count: int = 1
    """Number of identical replies that this row represents."""
    kind: Kind = "policy"
    """Source of the tokens inside the mask."""
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """float32 [N] by name: values of other models for the targets, such as `reference` logprobs; and TEACHER_TOP."""
    routed_experts: np.ndarray | None = None
    """[N, layers, k]: record of the experts that the sampler routed `tokens` to, in a mixture (`routed_experts`)."""
    images: tuple[PlacedImage, ...] = ()
    """Images among `tokens`."""

    @property
    def sequence(self) -> Tokens:
        """All N + 1 token ids, with the images among them."""
        ids = [*self.tokens.tolist(), *self.targets[-1:].tolist()]
        return EncodedPrompt(tokens=tuple(ids), images=self.images) if self.images else ids


def trained_turns(trajectory: Trajectory) -> tuple[Turn, ...]:
    """The turns to train on: those that the policy sampled, if the trajectory is trained at all."""
    return tuple(turn for turn in trajectory.turns if not turn.model) if trajectory.trained else ()


def rows_from_trajectory(trajectory: Trajectory) -> list[TrainingRow]:
    """The rows of a trajectory, with advantages 0. Their masks cover the trained tokens in order."""
    rows: list[_RowBuilder] = []
    for turn in trained_turns(trajectory):
        prompt = list(turn.prompt)
        if not rows or not rows[-1].is_prefix_of(turn):
            rows.append(_RowBuilder([], [], [], []))
        new_tokens = prompt[len(rows[-1].tokens) :]
        rows[-1].add(new_tokens, [0.0] * len(new_tokens), False)
        rows[-1].add(turn.tokens, turn.logprobs, True)
        rows[-1].add_record(turn)
        rows[-1].images = turn.images
    return [row.build() for row in rows]


def scatter_to_rows(rows: Sequence[TrainingRow], values_T: np.ndarray) -> list[np.ndarray]:
    """Values [T] of the tokens inside the rows' masks as a column float32 [N] per row, 0 outside the mask."""
    columns, begin = [], 0
    for row in rows:
        end = begin + int(row.mask.sum())
        column = np.zeros(len(row.mask), np.float32)
        column[row.mask] = values_T[begin:end]
        columns.append(column)
        begin = end
    return columns


def gather_from_rows(rows: Sequence[TrainingRow], columns: Sequence[np.ndarray]) -> np.ndarray:
    """float64 [T]: values of `columns` inside the rows' masks, in order. Inverse of `scatter_to_rows`."""
    pieces = [column[row.mask].astype(np.float64) for row, column in zip(rows, columns, strict=True)]
    return np.concatenate([np.zeros(0), *pieces])


def merge_identical_rows(rows: Sequence[TrainingRow], advantage_kink: float | None = None) -> list[TrainingRow]:
    """Merge rows with equal tokens and mask by summing their advantages; keeps the order and other values of the first.

    `advantage_kink` is the advantage at which the gradient of the loss has a kink: rows on different sides of it are
    not merged.
    """
    merged: list[TrainingRow] = []
    indices: dict[bytes, list[int]] = {}
    for row in rows:
        key = row.tokens.tobytes() + row.targets[-1:].tobytes() + row.mask.tobytes()
        key += b"" if row.routed_experts is None else row.routed_experts.tobytes()
        key += "".join(placed.image.digest for placed in row.images).encode()
        candidates = indices.setdefault(key, [])
        for index in candidates:
            if (combined := _merge_pair(merged[index], row, advantage_kink)) is not None:
                merged[index] = combined
                break
        else:
            candidates.append(len(merged))
            merged.append(row)
    return merged


def _merge_pair(first: TrainingRow, second: TrainingRow, advantage_kink: float | None) -> TrainingRow | None:
    """The merged row; None if the sampling policies differ, or if the sum crosses the kink of the loss."""
    advantages = first.advantages + second.advantages
    if np.abs(first.logprobs - second.logprobs).max(initial=0.0) > _LOGPROB_TOLERANCE:
        return None
    if advantage_kink is not None:
        above = first.advantages > advantage_kink
        if (above != (second.advantages > advantage_kink)).any() or (above != (advantages > advantage_kink)).any():
            return None
    return replace(first, advantages=advantages, count=first.count + second.count)


def is_truncated(trajectory: Trajectory) -> bool:
    """Whether a trained turn ended at max_tokens."""
    return any(turn.stop == "length" for turn in trained_turns(trajectory))


@dataclass(slots=True)
class _RowBuilder:
    """Collects the tokens of a row, including the first one, which is not a target."""

    tokens: list[int]
    logprobs: list[float]
    mask: list[bool]
    record: list[np.ndarray]
    """Routed experts of the first positions."""
    images: tuple[PlacedImage, ...] = ()

    def is_prefix_of(self, turn: Turn) -> bool:
        """Whether the turn's prompt extends the row so far, token by token and image by image."""
        same_tokens = list(turn.prompt[: len(self.tokens)]) == self.tokens
        return same_tokens and turn.images[: len(self.images)] == self.images

    def add(self, tokens: Sequence[int], logprobs: Sequence[float], mask: bool) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.mask += [mask] * len(tokens)

    def add_record(self, turn: Turn) -> None:
        """Add the routed experts of a turn. Positions that an earlier turn recorded keep that record: the tokens of
        that turn were sampled with it."""
        experts = from_text(turn.routed_experts) if turn.routed_experts else None
        if experts is not None and len(experts) == len(self.tokens) - 1:  # else the turn was changed
            self.record.append(experts[sum(map(len, self.record)) :])

    def _joined_record(self, length: int) -> np.ndarray | None:
        """The record of all positions, filled where no turn has any."""
        if not self.record:
            return None
        joined = np.concatenate(self.record)
        rest = (length - len(joined), *joined.shape[1:])
        return np.concatenate([joined, np.full(rest, missing(joined.dtype), joined.dtype)])

    def build(self) -> TrainingRow:
        return TrainingRow(
            tokens=np.array(self.tokens[:-1], np.int64),
            targets=np.array(self.tokens[1:], np.int64),
            logprobs=np.array(self.logprobs[1:], np.float32),
            advantages=np.zeros(len(self.tokens) - 1, np.float32),
            mask=np.array(self.mask[1:], bool),
            routed_experts=self._joined_record(len(self.tokens) - 1),
            images=self.images,
        )
