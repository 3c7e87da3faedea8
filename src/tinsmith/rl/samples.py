"""Groups and advantages become the rows that are trained on.

Turns that extend each other (the next prompt begins with the last prompt and reply, token by token) share one row; a
turn that does not begins a new one. Positions that the policy did not speak carry advantage 0 and logprob 0. Equal
replies of a group become one row whose advantages are summed, where the loss is linear in them: the same gradient from
less work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import tinker

from tinsmith.rl.types import POLICY, Group, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One row: position i of `tokens` predicts `targets[i]`.

    Example: prompt 5 6 and reply 7 2 with advantage 0.5 are tokens=[5, 6, 7], targets=[6, 7, 2],
    logprobs=[0, -0.9, -0.1], advantages=[0, 0.5, 0.5], mask=[False, True, True].
    """

    tokens: np.ndarray
    """int64 [N]."""
    targets: np.ndarray
    """int64 [N]."""
    logprobs: np.ndarray
    """float32 [N] of the sampler."""
    advantages: np.ndarray
    """float32 [N]."""
    mask: np.ndarray
    """bool [N]: where the policy spoke."""
    count: int = 1
    """Replies that this row stands for."""

    def datum(self) -> tinker.Datum:
        """As the SDK sends it; the mask is in the advantages."""
        inputs = {"target_tokens": self.targets, "logprobs": self.logprobs, "advantages": self.advantages}
        return tinker.Datum(
            model_input=tinker.ModelInput.from_ints(self.tokens.tolist()),
            loss_fn_inputs={name: tinker.TensorData.from_numpy(values) for name, values in inputs.items()},
        )


def samples(groups: Sequence[Group], advantages: Sequence[Sequence[np.ndarray]], *, merge: bool) -> list[Sample]:
    """Rows of every group that has advantages; `advantages[p][g]` is float32 over the policy's tokens of a rollout."""
    rows: list[Sample] = []
    for group, advantages_G in zip(groups, advantages, strict=True):
        if not len(advantages_G):
            continue
        mine: list[Sample] = []
        for rollout, advantages_T in zip(group.rollouts, advantages_G, strict=True):
            mine += [] if rollout.error else _rows(rollout, advantages_T)
        rows += _merged(mine) if merge else mine
    return rows


def spoken(rollout: Rollout) -> int:
    """How many tokens of it the policy spoke."""
    return sum(len(turn.tokens) for turn in rollout.turns if turn.role == POLICY)


@dataclass(slots=True)
class _Row:
    tokens: list[int]
    logprobs: list[float]
    advantages: list[float]
    mask: list[bool]

    def add(self, tokens: Sequence[int], logprobs: Sequence[float], advantages: Sequence[float], mask: bool) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.advantages += advantages
        self.mask += [mask] * len(tokens)

    def sample(self) -> Sample:
        return Sample(
            tokens=np.array(self.tokens[:-1], np.int64),
            targets=np.array(self.tokens[1:], np.int64),
            logprobs=np.array(self.logprobs[1:], np.float32),
            advantages=np.array(self.advantages[1:], np.float32),
            mask=np.array(self.mask[1:], bool),
        )


def _rows(rollout: Rollout, advantages_T: np.ndarray) -> list[Sample]:
    rows: list[_Row] = []
    begin = 0
    for turn in rollout.turns:
        if turn.role != POLICY:
            continue
        prompt = list(turn.prompt)
        if not rows or prompt[: len(rows[-1].tokens)] != rows[-1].tokens:
            rows.append(_Row([], [], [], []))
        fresh = prompt[len(rows[-1].tokens) :]
        rows[-1].add(fresh, [0.0] * len(fresh), [0.0] * len(fresh), False)
        end = begin + len(turn.tokens)
        rows[-1].add(turn.tokens, turn.logprobs, advantages_T[begin:end].tolist(), True)
        begin = end
    return [row.sample() for row in rows]


def _merged(rows: Sequence[Sample]) -> list[Sample]:
    """Equal rows as one, in the order of their first; the first one's logprobs stand for all."""
    kept: dict[bytes, Sample] = {}
    for row in rows:
        key = row.tokens.tobytes() + row.targets[-1:].tobytes() + row.mask.tobytes()
        if (twin := kept.get(key)) is not None:
            row = replace(twin, advantages=twin.advantages + row.advantages, count=twin.count + row.count)
        kept[key] = row
    return list(kept.values())
