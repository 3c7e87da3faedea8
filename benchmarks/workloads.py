"""Workloads: token rows of realistic lengths from a seed, the same for both sides."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tinsmith.engine.base import Datum, Pass

VOCABULARY = 500
"""Ids that every model has, the smallest of the tests too; the work does not depend on which they are."""
PROMPT = 150
ANSWER = (40, 160)
GROUPS, GROUP = 8, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows [prompt + answer], and the length of each prompt."""

    name: str
    rows: list[np.ndarray]
    prompts: list[int]

    @property
    def tokens(self) -> int:
        """Positions that are scored, as a user counts them: a shared prompt in every row, padding nowhere."""
        return sum(len(row) - 1 for row in self.rows)

    def as_pass(self, model_id: str) -> Pass:
        """The same work as a request of the engine."""
        data = []
        for row, prompt in zip(self.rows, self.prompts, strict=True):
            advantages = np.zeros(len(row) - 1, dtype=np.float32)
            advantages[prompt - 1 :] = 0.5
            inputs = {"advantages": advantages, "logprobs": np.full(len(row) - 1, -6.0, np.float32) * (advantages != 0)}
            data.append(Datum(tokens=row[:-1].astype(np.int32), targets=row[1:].astype(np.int64), inputs=inputs))
        return Pass(model_id=model_id, data=tuple(data), loss_fn="importance_sampling")


def grpo(seed: int = 0, *, shared: bool = True, groups: int = GROUPS, group: int = GROUP) -> Batch:
    """`groups` prompts of 150 tokens with `group` answers of 40 to 160; or as many rows, each with its own prompt.

    The lengths are the same either way, so a side that shares nothing does the same work on both.
    """
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(groups):
        prompt = _tokens(draw, PROMPT)
        for _ in range(group):
            answer = _tokens(draw, int(draw.integers(ANSWER[0], ANSWER[1] + 1)))
            own = prompt if shared else _tokens(np.random.default_rng(1000 + len(rows)), PROMPT)
            rows.append(np.concatenate([own, answer]))
    name = f"{groups} prompts of {PROMPT} tokens x {group} answers" if shared else f"{len(rows)} different prompts"
    return Batch(name=name, rows=rows, prompts=[PROMPT] * len(rows))


def rows_of(length: int, count: int, seed: int = 0) -> Batch:
    """`count` rows that share nothing and score `length` positions each, half of them prompt."""
    draw = np.random.default_rng(seed)
    rows = [_tokens(draw, length + 1) for _ in range(count)]
    return Batch(name=f"{count} x {length}", rows=rows, prompts=[1 + length // 2] * count)


def questions(count: int = 8, length: int = PROMPT, seed: int = 0) -> list[np.ndarray]:
    """Prompts to sample from."""
    draw = np.random.default_rng(seed)
    return [_tokens(draw, length).astype(np.int32) for _ in range(count)]


def _tokens(draw: np.random.Generator, length: int) -> np.ndarray:
    return draw.integers(3, VOCABULARY, length)
